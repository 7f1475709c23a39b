`include "check.svh"

// One lane of exact arithmetic: a coefficient of SIG_W bits times an FP16 value, as a sum's addend.
//
// The coefficient is (-1)^a_sign x a_sig x 2^(a_shift - 24), so `product` counts units of 2^-48. Three cycles, which
// pass while `en` is high. `bad` says that b was NaN or infinite; it then counts as zero.
module fp16_product #(
    parameter int SIG_W = 16,
    parameter int ACC_W = 88
) (
    input  logic                    clk,
    input  logic                    en,
    input  logic                    a_sign,
    input  logic [SIG_W-1:0]        a_sig,
    input  logic [4:0]              a_shift,
    input  logic [15:0]             b,
    output logic signed [ACC_W-1:0] product,
    output logic                    bad
);
  `include "fp16.svh"

  `CHECK(SIG_W <= 17, "fp16_product: SIG_W must be at most 17, one DSP takes no more")
  `CHECK(ACC_W >= SIG_W + 71, "fp16_product: ACC_W cannot hold every product")

  logic signed [SIG_W:0]    a_reg;
  logic signed [11:0]       b_reg;
  logic [5:0]               shift_0, shift_1;
  logic                     bad_0, bad_1;
  logic signed [SIG_W+12:0] raw;
  logic signed [ACC_W-1:0]  wide;

  assign wide = raw;  // extends the sign

  always_ff @(posedge clk) begin
    if (en) begin
      a_reg   <= (a_sign ^ b[15]) ? -{1'b0, a_sig} : {1'b0, a_sig};
      b_reg   <= {1'b0, fp16_sig(b)};
      shift_0 <= {1'b0, a_shift} + {1'b0, fp16_shift(b)};
      bad_0   <= fp16_bad(b);
      raw     <= a_reg * b_reg;
      shift_1 <= shift_0;
      bad_1   <= bad_0;
      product <= wide <<< shift_1;
      bad     <= bad_1;
    end
  end
endmodule
