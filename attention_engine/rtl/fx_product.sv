`include "check.svh"

// Product of a coefficient and an FP16 value, rounded to fixed point.
//
// The coefficient is (-1)^a_sign x a_sig x 2^a_shift. The result is (-1)^sign x size with size = round(a_sig x sig(b) x
// 2^(a_shift + shift(b) - RIGHT)), ties to even; b is sig x 2^(shift - 24). A size of more than SIZE_W bits saturates
// and sets `over`. `bad`: b is NaN or infinite; b is then zero. Throughput: one per cycle; latency: five cycles.
module fx_product #(
    parameter int SIG_W = 24,
    parameter int SIZE_W = 38,
    parameter int RIGHT = 37
) (
    input  logic              clk,
    input  logic              a_sign,
    input  logic [SIG_W-1:0]  a_sig,
    input  logic [4:0]        a_shift,
    input  logic [15:0]       b,
    output logic [SIZE_W-1:0] size,
    output logic              sign,
    output logic              over,
    output logic              bad
);
  `include "fp16.svh"

  localparam int RAW_W = SIG_W + 11;
  localparam int WIDE_W = RAW_W + 63;

  `CHECK(SIG_W >= 11 && SIG_W <= 24, "fx_product: SIG_W must be 11 to 24, one DSP takes no more")
  `CHECK(RIGHT >= 2 && RIGHT + SIZE_W < WIDE_W, "fx_product: RIGHT must be 2 at least, RIGHT + SIZE_W below SIG_W + 74")

  logic [SIG_W-1:0] a_reg;
  logic [10:0] b_reg;
  logic [5:0] shift_0, shift_1;
  logic [2:0] coarse;
  logic [RAW_W-1:0] raw;
  logic [RAW_W+6:0] fine;
  logic [WIDE_W-1:0] wide;
  logic [SIZE_W:0] near;  // size and half a unit
  logic beyond, rest;
  logic [SIZE_W:0] rounded;
  logic [3:0] signs, bads;

  assign wide = WIDE_W'(fine) << {coarse, 3'b0};
  assign rounded = {1'b0, near[SIZE_W:1]} + {{SIZE_W{1'b0}}, near[0] && (rest || near[1])};

  always_ff @(posedge clk) begin
    a_reg <= a_sig;
    b_reg <= fp16_sig(b);
    shift_0 <= {1'b0, a_shift} + {1'b0, fp16_shift(b)};
    raw <= a_reg * b_reg;
    shift_1 <= shift_0;
    fine <= {7'b0, raw} << shift_1[2:0];
    coarse <= shift_1[5:3];
    near <= wide[RIGHT-1 +: SIZE_W+1];
    rest <= wide[RIGHT-2:0] != '0;
    beyond <= wide >> (RIGHT + SIZE_W) != '0;
    size <= beyond || rounded[SIZE_W] ? '1 : rounded[SIZE_W-1:0];
    over <= beyond || rounded[SIZE_W];
    {sign, signs} <= {signs, a_sign ^ b[15]};
    {bad, bads} <= {bads, fp16_bad(b)};
  end
endmodule
