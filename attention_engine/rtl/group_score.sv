`include "check.svh"

// Score of a token over its query group as a sortable key: the sum of 2^x / l over the queries.
//
// s: 2^x from `exp2_unit` and the reciprocal of the query's l from `softmax_online`; s_tlast: the last query of a
// token. m_tdata: {0, 9-bit exponent, 20 mantissa bits}; scores below 2^-500 are 0. Addends are truncated to the
// position of the largest addend so far. Throughput: one query per cycle; latency: eight cycles. The sink must always
// be ready.
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

  logic [6:0] valid, last;
  logic [36:0] low, high;
  logic [48:0] product;
  logic signed [14:0] exp_0, exp_1, exp_2, exp_sum, exp_3, lead, lag, exp_end, field;
  logic [23:0] mant, mant_3, kept;
  logic [27:0] sum, minor, major, whole;
  logic [4:0] gap, gap_3;
  logic [2:0] spare;
  logic first, first_3, grows, grows_3, less_3;
  integer j;

  // A value is mant x 2^exp. The sum uses the larger exponent, can hold 16 addends and is normalized at the end.
  // The exponent is one cycle ahead of the sum
  assign lead = exp_sum - exp_2;
  assign lag = exp_2 - exp_sum;
  assign grows = first || lead < 0;
  assign gap = lead < 0 ? (lag[14:5] != '0 ? 5'd31 : lag[4:0]) : lead[14:5] != '0 ? 5'd31 : lead[4:0];
  assign major = grows_3 ? {4'b0, mant_3} : sum;
  assign minor = first_3 ? 28'd0 : (less_3 ? sum : {4'b0, mant_3}) >> gap_3;

  always_comb begin
    spare = 3'd0;
    for (j = 1; j <= 4; j = j + 1) if (whole[23+j]) spare = 3'(j);
  end

  always_ff @(posedge clk) begin
    valid <= {valid[5:0], s_tvalid};
    last <= {last[5:0], s_tlast};
    low <= s_tdata[23:0] * s_recip[11:0];
    high <= s_tdata[23:0] * s_recip[24:12];
    exp_0 <= $signed({{(15-INT_W){s_tdata[INT_W+23]}}, s_tdata[INT_W+23:24]}) + $signed({9'b0, s_zeros}) - 15'sd39;
    product <= {high, 12'b0} + {12'b0, low};
    exp_1 <= exp_0;
    mant <= product[47] ? product[47:24] : product[46:23];
    exp_2 <= exp_1 + (product[47] ? 15'sd1 : 15'sd0);
    if (valid[2]) begin
      exp_sum <= grows ? exp_2 : exp_sum;
      first <= last[2];
    end
    mant_3 <= mant;
    gap_3 <= gap;
    {first_3, grows_3, less_3} <= {first, grows, lead < 0};
    if (valid[3]) sum <= major + minor;
    exp_3 <= exp_sum;
    whole <= sum;
    exp_end <= exp_3;
    kept <= 24'(whole >> spare);
    field <= exp_end + $signed({12'b0, spare}) + 15'(23 + BIAS);
    m_tvalid <= valid[6] && last[6];
    m_tdata <= field <= 0 ? 30'd0 : {1'b0, field[8:0], kept[22:3]};
    if (rst) begin
      valid <= '0;
      m_tvalid <= 1'b0;
      first <= 1'b1;
    end
  end
endmodule
