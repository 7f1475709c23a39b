`include "check.svh"

// Selects the refined pages and the value pages to read, from the weights of tokens.
//
// s_l: l of each query in sequence, with 32 fractional bits (softmax_online); then s_w: weights of all queries token by
// token, 17 fractional bits; s_w_tlast ends them. A refined page of REFINED tokens is chosen if the sum of w^2 exceeds
// gain_threshold x l^2 for at least one query; a value page of VALUES tokens is read if the sum of w exceeds
// mass_threshold x l for at least one query. Thresholds have 32 fractional bits and must stay constant from the first l
// onward. m: at the end of a page, m_tdata is {value page is read, refined page is chosen}; m_tkeep marks which of the
// two ends; m_tlast: the last token.
//
// Limits take 103 cycles per query, then each weight takes one cycle. Sums and limits are exact, except that l is
// truncated to 17 fractional bits and limits are truncated to the units of the compared sums.
module page_gains #(
    parameter int Q_HEADS = 1,
    parameter int REFINED = 31,
    parameter int VALUES = 224,
    parameter int ID_W = Q_HEADS > 1 ? $clog2(Q_HEADS) : 1
) (
    input  logic        clk,
    input  logic        rst,
    input  logic [31:0] gain_threshold,
    input  logic [31:0] mass_threshold,
    input  logic        s_l_tvalid,
    output logic        s_l_tready,
    input  logic [47:0] s_l_tdata,
    input  logic        s_w_tvalid,
    output logic        s_w_tready,
    input  logic [16:0] s_w_tdata,
    input  logic        s_w_tlast,
    output logic        m_tvalid,
    input  logic        m_tready,
    output logic [1:0]  m_tdata,
    output logic [1:0]  m_tkeep,
    output logic        m_tlast
);
  localparam int L_W = 33;
  localparam int GAIN_W = 42;  // 256 x (2^17)^2
  localparam int MASS_W = 25;
  localparam int AT_W = $clog2(REFINED > VALUES ? REFINED + 1 : VALUES + 1);

  `CHECK(Q_HEADS >= 1 && Q_HEADS <= 8, "page_gains: Q_HEADS must be 1 to 8")
  `CHECK(REFINED >= 1 && REFINED <= 256 && VALUES >= 1 && VALUES <= 256, "page_gains: pages must have 1 to 256 tokens")

  // --- limits: three products per query: l^2, l^2 x threshold, l x threshold

  logic [1:0] step;
  logic product_valid, product_ready, ask, asked, limits_in;
  logic [L_W-1:0] l;
  logic [2*L_W-1:0] factor, square;
  logic [3*L_W-1:0] product;
  logic [ID_W-1:0] limit_head;
  logic working;
  logic [GAIN_W-1:0] gain_limits [0:Q_HEADS-1];
  logic [MASS_W-1:0] mass_limits [0:Q_HEADS-1];

  assign s_l_tready = !working && !limits_in;
  assign factor = step == 2'd1 ? square : {{L_W{1'b0}}, l};

  serial_multiply #(.A_W(2 * L_W), .B_W(L_W)) multiply (
      .clk(clk), .rst(rst), .s_tvalid(ask), .s_tready(product_ready), .s_a(factor),
      .s_b(step == 2'd0 ? l : {1'b0, step == 2'd1 ? gain_threshold : mass_threshold}), .m_tvalid(product_valid),
      .m_tready(1'b1), .m_tdata(product));

  assign ask = working && !asked;

  always_ff @(posedge clk) begin
    if (s_l_tvalid && s_l_tready) begin
      l <= s_l_tdata[47:15];
      working <= 1'b1;
      step <= 2'd0;
    end
    if (ask && product_ready) asked <= 1'b1;
    if (product_valid) begin
      asked <= 1'b0;
      step <= step + 1'b1;
      if (step == 2'd0) square <= product[2*L_W-1:0];
      if (step == 2'd1) gain_limits[limit_head] <= product[3*L_W-1:32+GAIN_W] != '0 ? '1 : product[32 +: GAIN_W];
      if (step == 2'd2) begin
        mass_limits[limit_head] <= product[3*L_W-1:32+MASS_W] != '0 ? '1 : product[32 +: MASS_W];
        working <= 1'b0;
        limit_head <= limit_head == ID_W'(Q_HEADS - 1) ? '0 : limit_head + 1'b1;
        limits_in <= limit_head == ID_W'(Q_HEADS - 1);
      end
    end
    if (s_w_tvalid && s_w_tready && s_w_tlast) limits_in <= 1'b0;
    if (rst) begin
      {working, asked, limits_in} <= 3'b000;
      limit_head <= '0;
    end
  end

  // --- sums of the weights of a page; the comparison is at its last token

  localparam int INFO_W = ID_W + 5;  // query; start and end of a refined page and of a value page; last
  logic en, take, head_last;
  logic [1:0] begins, ends;
  logic [AT_W-1:0] refined_at, value_at;
  logic [ID_W-1:0] head;
  logic [4:0] valid;
  logic [5*INFO_W-1:0] infos;
  logic [16:0] w_1, w_2;
  logic [33:0] square_2;
  logic [GAIN_W-1:0] gains [0:Q_HEADS-1];
  logic [MASS_W-1:0] masses [0:Q_HEADS-1];
  logic [GAIN_W-1:0] gain, gain_3, gain_limit_3;
  logic [MASS_W-1:0] mass, mass_3, mass_limit_3;
  logic [1:0] begins_2, ends_4, hit_4, any, any_now;
  logic [ID_W-1:0] head_2, head_4;
  logic last_4, last_head_4;

  assign en = m_tready || !m_tvalid;
  assign s_w_tready = en && limits_in;
  assign take = s_w_tvalid && s_w_tready;
  assign head_last = head == ID_W'(Q_HEADS - 1);
  assign begins = {value_at == '0, refined_at == '0};
  assign {head_2, begins_2} = infos[INFO_W+3 +: ID_W+2];
  assign gain = (begins_2[0] ? '0 : gains[head_2]) + GAIN_W'(square_2);
  assign mass = (begins_2[1] ? '0 : masses[head_2]) + MASS_W'(w_2);
  assign {ends_4, last_4} = infos[3*INFO_W +: 3];
  assign head_4 = infos[3*INFO_W+5 +: ID_W];
  assign last_head_4 = head_4 == ID_W'(Q_HEADS - 1);
  assign any_now = hit_4 | (head_4 == '0 ? 2'b00 : any);

  // The end of the sequence is known only at its last weight: the last query of a token marks the end
  assign ends = {value_at == AT_W'(VALUES - 1), refined_at == AT_W'(REFINED - 1)};

  always_ff @(posedge clk) begin
    if (take) begin
      head <= head_last ? '0 : head + 1'b1;
      if (head_last) begin
        refined_at <= ends[0] || s_w_tlast ? '0 : refined_at + 1'b1;
        value_at <= ends[1] || s_w_tlast ? '0 : value_at + 1'b1;
      end
    end
    if (en) begin
      valid <= {valid[3:0], take};
      infos <= {infos[4*INFO_W-1:0], head, begins, ends | {2{s_w_tlast}}, s_w_tlast};
      w_1 <= s_w_tdata;
      w_2 <= w_1;
      square_2 <= w_1 * w_1;
      gain_3 <= gain;
      mass_3 <= mass;
      gain_limit_3 <= gain_limits[head_2];
      mass_limit_3 <= mass_limits[head_2];
      hit_4 <= {mass_3 > mass_limit_3, gain_3 > gain_limit_3};
      if (valid[1]) begin
        gains[head_2] <= gain;
        masses[head_2] <= mass;
      end
      if (valid[3]) any <= any_now;
      m_tvalid <= valid[3] && last_head_4 && ends_4 != '0;
      m_tdata <= any_now;
      m_tkeep <= ends_4;
      m_tlast <= last_4;
    end
    if (rst) begin
      head <= '0;
      refined_at <= '0;
      value_at <= '0;
      valid <= '0;
      m_tvalid <= 1'b0;
    end
  end
endmodule
