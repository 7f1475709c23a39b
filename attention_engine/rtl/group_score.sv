`include "check.svh"

// A token's score over its query group as a key that sorts: the sum of 2^x / l over the queries.
//
// s: 2^x as `exp2_unit` gives it, with the reciprocal of that query's l as `softmax_online` gives it; s_tlast: the last
// query of a token. m_tdata: {0, exponent of 9 bits, 20 bits of the mantissa}; what lies below 2^-500 is 0. Sums are
// cut to 24 bits at every addition. One query a cycle, four cycles; the sink must always be ready.
module group_score #(
    parameter int INT_W = 13
) (
    input  logic             clk,
    input  logic             rst,
    input  logic             s_tvalid,
    input  logic [INT_W+23:0] s_tdata,
    input  logic [24:0]      s_recip,
    input  logic [5:0]       s_zeros,
    input  logic             s_tlast,
    output logic             m_tvalid,
    output logic [29:0]      m_tdata
);
  localparam int BIAS = 500;

  `CHECK(INT_W >= 2 && INT_W <= 14, "group_score: INT_W must be 2 to 14")

  logic [2:0] valid;
  logic [2:0] last;
  logic [48:0] product;
  logic signed [15:0] exp_0, exp_1, exp_sum, exp_gap, exp_big, exp_next, field;
  logic [23:0] mant, sum, minor, major;
  logic [24:0] added;
  logic [23:0] next;
  logic [4:0] gap;
  logic first;

  // A value is mant x 2^exp; the larger of sum and addend keeps its place
  assign exp_gap = exp_sum - exp_1;
  assign major = first || exp_gap < 0 ? mant : sum;
  assign exp_big = first || exp_gap < 0 ? exp_1 : exp_sum;
  assign gap = (exp_gap > 31 || exp_gap < -31) ? 5'd31 : exp_gap < 0 ? 5'(-exp_gap) : 5'(exp_gap);
  assign minor = first ? 24'd0 : exp_gap < 0 ? sum >> gap : mant >> gap;
  assign added = major + minor;
  assign next = added[24] ? added[24:1] : added[23:0];
  assign exp_next = exp_big + (added[24] ? 16'sd1 : 16'sd0);
  assign field = exp_sum + 16'(23 + BIAS);

  always_ff @(posedge clk) begin
    valid <= {valid[1:0], s_tvalid};
    last <= {last[1:0], s_tlast};
    product <= s_tdata[23:0] * s_recip;
    exp_0 <= $signed({{(16-INT_W){s_tdata[INT_W+23]}}, s_tdata[INT_W+23:24]}) + $signed({10'b0, s_zeros}) - 16'sd39;
    mant <= product[47] ? product[47:24] : product[46:23];
    exp_1 <= exp_0 + (product[47] ? 16'sd1 : 16'sd0);
    if (valid[1]) begin
      sum <= next;
      exp_sum <= exp_next;
      first <= last[1];
    end
    m_tvalid <= valid[2] && last[2];
    m_tdata <= field <= 0 ? 30'd0 : {1'b0, field[8:0], sum[22:3]};
    if (rst) begin
      valid <= '0;
      m_tvalid <= 1'b0;
      first <= 1'b1;
    end
  end
endmodule
