`include "check.svh"

// Softmax statistics of a stream of scores: the running maximum m and l, the sum of 2^(x - m), which is rescaled when m
// grows; at the end, one reciprocal of l for each of CONTEXTS interleaved rows.
//
// s_tdata: x in log2 units, 32 bits with 20 fractional bits; s_tid: its row; s_tlast: the last score of all rows. The
// unit then accepts no input until m has output CONTEXTS beats. m is an integer above the maximum, so that a rescale is
// a shift. m_max: m; m_sum: l with 32 fractional bits; m_recip in (2^23, 2^24]: 1 / l = m_recip x 2^(9 + m_zeros - 48)
// within 2^-22; m_zeros is the number of leading zeros of l. A row without scores has l = 0.
module softmax_online #(
    parameter int CONTEXTS = 1,
    parameter int ID_W = CONTEXTS > 1 ? $clog2(CONTEXTS) : 1
) (
    input  logic            clk,
    input  logic            rst,
    input  logic            s_tvalid,
    output logic            s_tready,
    input  logic [31:0]     s_tdata,
    input  logic [ID_W-1:0] s_tid,
    input  logic            s_tlast,
    output logic            m_tvalid,
    input  logic            m_tready,
    output logic [12:0]     m_max,
    output logic [47:0]     m_sum,
    output logic [5:0]      m_zeros,
    output logic [24:0]     m_recip,
    output logic [ID_W-1:0] m_tid,
    output logic            m_tlast
);
  localparam int USER_W = ID_W + 7;  // row, last, shift of its sum

  `CHECK(CONTEXTS >= 1 && CONTEXTS <= 16, "softmax_online: CONTEXTS must be 1 to 16")

  logic signed [12:0] top [0:CONTEXTS-1];
  logic [47:0] sum [0:CONTEXTS-1];
  logic [CONTEXTS-1:0] seen;
  logic closing;  // all scores have arrived

  // The integer above the score, and the resulting right shift of the sum
  logic signed [12:0] above, prior, now, prior_1, now_1;
  logic signed [13:0] growth;
  logic [5:0] shrink;
  logic take;

  assign take = s_tvalid && s_tready;
  assign above = {s_tdata[31], s_tdata[31:20]} + 13'sd1;
  assign prior = seen[s_tid] ? top[s_tid] : above;
  assign now = above > prior ? above : prior;
  assign growth = now_1 - prior_1;
  assign shrink = first_1 || growth > 14'sd63 ? 6'd63 : growth[5:0];  // the first score of a row has no previous sum
  assign s_tready = !closing;

  logic valid_1, last_1, first_1, x_valid;
  logic [31:0] data_1;
  logic [ID_W-1:0] id_1;
  logic [32:0] x_data;  // x - m, negative
  logic [USER_W-1:0] x_user;

  always_ff @(posedge clk) begin
    {valid_1, last_1, id_1, data_1} <= {take, s_tlast, s_tid, s_tdata};
    {now_1, prior_1} <= {now, prior};
    first_1 <= !seen[s_tid];
    x_valid <= valid_1;
    x_data <= {data_1[31], data_1} - {now_1, 20'b0};
    x_user <= {id_1, last_1, shrink};
    if (take) begin
      top[s_tid] <= now;
      seen[s_tid] <= 1'b1;
      if (s_tlast) closing <= 1'b1;
    end
    if (done) begin
      seen <= '0;
      closing <= 1'b0;
    end
    if (rst) begin
      {valid_1, x_valid} <= 2'b00;
      seen <= '0;
      closing <= 1'b0;
    end
  end

  logic e_valid, e_ready;
  logic [36:0] e_data;
  logic [USER_W-1:0] e_user;
  logic x_ready;

  exp2_unit #(.INT_W(13), .USER_W(USER_W)) exp2 (
      .clk(clk), .rst(rst), .s_tvalid(x_valid), .s_tready(x_ready), .s_tdata(x_data), .s_tuser(x_user),
      .m_tvalid(e_valid), .m_tready(1'b1), .m_tdata(e_data), .m_tuser(e_user));

  // The sum: 2^f with negative f, 32 fractional bits
  logic [12:0] down;  // -f - 1
  logic [31:0] term;
  logic [ID_W-1:0] e_id;
  logic [5:0] e_shrink;
  logic e_last, term_valid;
  logic reduce;

  assign down = ~e_data[36:24];

  always_ff @(posedge clk) begin
    term_valid <= e_valid;
    term <= down > 13'd31 ? 32'd0 : {e_data[23:0], 8'b0} >> down[4:0];
    {e_id, e_last, e_shrink} <= e_user;
    if (term_valid) sum[e_id] <= (sum[e_id] >> e_shrink) + {16'd0, term};
    if (rst) term_valid <= 1'b0;
  end

  // Reciprocals, row by row
  logic [ID_W-1:0] row;
  logic asked, ask, d_ready, done;
  logic [3:0] settled;
  logic [47:0] quotient, total, normal;
  logic [5:0] zeros;

  assign ask = settled[3];  // the leading one of the sum is at the top
  assign done = m_tvalid && m_tready && m_tlast;
  assign m_max = seen[row] ? top[row] : 13'd0;
  assign m_sum = total;
  assign m_zeros = zeros;
  assign m_recip = total == '0 ? 25'd0 : quotient[24:0];
  assign m_tid = row;
  assign m_tlast = row == ID_W'(CONTEXTS - 1);

  normalize #(.W(48)) norm (.clk(clk), .en(1'b1), .value(total), .normal(normal), .zeros(zeros));

  always_ff @(posedge clk) begin
    if (term_valid && e_last) reduce <= 1'b1;
    total <= seen[row] ? sum[row] : 48'd0;
    settled <= {settled[2:0], reduce && !asked};
    if (!reduce || asked) settled <= '0;
    if (ask && d_ready) asked <= 1'b1;
    if (m_tvalid && m_tready) begin
      asked <= 1'b0;
      row <= m_tlast ? '0 : row + 1'b1;
      if (m_tlast) reduce <= 1'b0;
    end
    if (rst) begin
      reduce <= 1'b0;
      asked <= 1'b0;
      settled <= '0;
      row <= '0;
    end
  end

  serial_divide #(.NUM_W(48), .DEN_W(24)) divide (
      .clk(clk), .rst(rst), .s_tvalid(ask && !asked), .s_tready(d_ready), .s_num(48'd1 << 47),
      .s_den(normal[47:24]), .m_tvalid(m_tvalid), .m_tready(m_tready), .m_tdata(quotient));
endmodule
