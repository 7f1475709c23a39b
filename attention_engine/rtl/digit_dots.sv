`include "check.svh"

// Dot products of digits and coefficients: 16 bytes, one quarter of a line, contain four rows of 16 2-bit digits.
//
// Byte 4 t + j has digits 4 s + j of row t, s = 0 to 3, at bit 2 s. coefs: 16 coefficients of COEF_W bits, two's
// complement. sums: the exact sum of coefficient x digit for each row. Throughput: one per cycle; latency: three
// cycles.
module digit_dots #(
    parameter int COEF_W = 8,
    parameter int SUM_W = COEF_W + 6
) (
    input  logic                 clk,
    input  logic [127:0]         digits,
    input  logic [16*COEF_W-1:0] coefs,
    output logic [4*SUM_W-1:0]   sums
);
  localparam int TERM_W = COEF_W + 2;
  localparam int FOUR_W = TERM_W + 2;

  `CHECK(COEF_W >= 2 && SUM_W == COEF_W + 6, "digit_dots: COEF_W must be 2 at least, SUM_W six more")

  genvar t, k;

  generate
    for (t = 0; t < 4; t = t + 1) begin : g_row
      logic [16*TERM_W-1:0] terms;
      logic [4*FOUR_W-1:0] fours;
      for (k = 0; k < 16; k = k + 1) begin : g_term
        logic [1:0] digit;
        logic [COEF_W-1:0] coef;
        logic [TERM_W-1:0] once;
        assign digit = digits[8*(4*t+k%4)+2*(k/4) +: 2];
        assign coef = coefs[COEF_W*k +: COEF_W];
        assign once = {{2{coef[COEF_W-1]}}, coef};
        always_ff @(posedge clk)
          terms[TERM_W*k +: TERM_W] <= (digit[0] ? once : '0) + (digit[1] ? {once[TERM_W-2:0], 1'b0} : '0);
      end
      for (k = 0; k < 4; k = k + 1) begin : g_four
        always_ff @(posedge clk)
          fours[FOUR_W*k +: FOUR_W] <= FOUR_W'($signed(terms[TERM_W*4*k +: TERM_W]))
              + FOUR_W'($signed(terms[TERM_W*(4*k+1) +: TERM_W])) + FOUR_W'($signed(terms[TERM_W*(4*k+2) +: TERM_W]))
              + FOUR_W'($signed(terms[TERM_W*(4*k+3) +: TERM_W]));
      end
      always_ff @(posedge clk)
        sums[SUM_W*t +: SUM_W] <= SUM_W'($signed(fours[0 +: FOUR_W])) + SUM_W'($signed(fours[FOUR_W +: FOUR_W]))
            + SUM_W'($signed(fours[2*FOUR_W +: FOUR_W])) + SUM_W'($signed(fours[3*FOUR_W +: FOUR_W]));
    end
  endgenerate
endmodule
