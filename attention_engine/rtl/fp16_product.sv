`include "check.svh"

// One lane of exact arithmetic: the product of a coefficient of SIG_W bits and an FP16 value, as an addend.
//
// The coefficient is (-1)^a_sign x a_sig x 2^(a_shift - 24). The product, in units of 2^-48, is `ones` + `minus`: a
// negative product is the complement of its magnitude, and the adder supplies the carry. The latency is four cycles,
// which advance while `en` is high. `bad`: b is NaN or infinite; b is then zero.
module fp16_product #(
    parameter int SIG_W = 16,
    parameter int ACC_W = 88
) (
    input  logic             clk,
    input  logic             en,
    input  logic             a_sign,
    input  logic [SIG_W-1:0] a_sig,
    input  logic [4:0]       a_shift,
    input  logic [15:0]      b,
    output logic [ACC_W-1:0] ones,
    output logic             minus,
    output logic             bad
);
  `include "fp16.svh"

  localparam int RAW_W = SIG_W + 11;

  `CHECK(SIG_W <= 17, "fp16_product: SIG_W must be at most 17, one DSP takes no more")
  `CHECK(ACC_W >= RAW_W + 60, "fp16_product: ACC_W cannot hold every product")

  logic [SIG_W-1:0] a_reg;
  logic [10:0]      b_reg;
  logic [5:0]       shift_0, shift_1;
  logic [2:0]       coarse;
  logic [2:0]       signs, bads;
  logic [RAW_W-1:0] raw;
  logic [RAW_W+6:0] fine;
  logic [ACC_W-1:0] size;

  assign ones = size ^ {ACC_W{minus}};

  always_ff @(posedge clk) begin
    if (en) begin
      a_reg   <= a_sig;
      b_reg   <= fp16_sig(b);
      shift_0 <= {1'b0, a_shift} + {1'b0, fp16_shift(b)};
      raw     <= a_reg * b_reg;
      shift_1 <= shift_0;
      fine    <= {7'b0, raw} << shift_1[2:0];
      coarse  <= shift_1[5:3];
      size    <= ACC_W'(fine) << {coarse, 3'b0};
      {minus, signs} <= {signs, a_sign ^ b[15]};
      {bad, bads}    <= {bads, fp16_bad(b)};
    end
  end
endmodule
