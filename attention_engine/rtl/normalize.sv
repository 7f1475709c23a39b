`include "check.svh"

// Shifts a number left until its leading one is the top bit, and outputs the number of shifts. Each cycle does two
// halvings, so the latency is (log2 W + 1) / 2 cycles, which advance while `en` is high. Zero stays zero, with `zeros`
// all ones.
module normalize #(
    parameter int W = 48,
    parameter int Z_W = $clog2(W)
) (
    input  logic           clk,
    input  logic           en,
    input  logic [W-1:0]   value,
    output logic [W-1:0]   normal,
    output logic [Z_W-1:0] zeros
);
  localparam int STAGES = (Z_W + 1) / 2;

  `CHECK(W >= 3, "normalize: W must be 3 at least")

  genvar s;

  generate
    for (s = 0; s < STAGES; s = s + 1) begin : g_stage
      localparam int HIGH = Z_W - 1 - 2 * s;  // first halving: 2^HIGH positions
      localparam int LOW = HIGH > 0 ? HIGH - 1 : 0;
      logic [W-1:0] in, once, out;
      logic [Z_W-1:0] count, count_out;
      logic first, second;
      if (s == 0) begin : g_first
        assign in = value;
        assign count = '0;
      end else begin : g_next
        assign in = g_stage[s-1].out;
        assign count = g_stage[s-1].count_out;
      end
      assign first = in >> (W - (1 << HIGH)) == '0;
      assign once = first ? in << (1 << HIGH) : in;
      assign second = HIGH > 0 && once >> (W - (1 << LOW)) == '0;
      always_ff @(posedge clk) begin
        if (en) begin
          out <= second ? once << (1 << LOW) : once;
          count_out <= count | (Z_W'(first) << HIGH) | (Z_W'(second) << LOW);
        end
      end
    end
  endgenerate

  assign normal = g_stage[STAGES-1].out;
  assign zeros = g_stage[STAGES-1].count_out;
endmodule
