`include "check.svh"

// Exact logits: the unit stores q of Q_HEADS queries; each row of the K stream is used for all queries.
//
// s_q: q of all queries for the first channel, then for the next channel; s_q_tlast ends it. s_k: rows of DIM values,
// LANES per beat, Q_HEADS cycles per beat. m: one sum for each row and query, in units of 2^-48; m_tuser: NaN or
// infinity in the input.
module gemv_qk #(
    parameter int DIM = 128,
    parameter int Q_HEADS = 1,
    parameter int LANES = 32,
    parameter int ACC_W = 88,
    parameter int ID_W = Q_HEADS > 1 ? $clog2(Q_HEADS) : 1
) (
    input  logic                clk,
    input  logic                rst,
    input  logic                s_q_tvalid,
    output logic                s_q_tready,
    input  logic [15:0]         s_q_tdata,
    input  logic                s_q_tlast,
    input  logic                s_k_tvalid,
    output logic                s_k_tready,
    input  logic [16*LANES-1:0] s_k_tdata,
    input  logic                s_k_tlast,
    output logic                m_tvalid,
    input  logic                m_tready,
    output logic [ACC_W-1:0]    m_tdata,
    output logic [ID_W-1:0]     m_tid,
    output logic                m_tuser
);
  localparam int BEATS = DIM / LANES;
  localparam int WORDS = BEATS * Q_HEADS;
  localparam int WORD_W = WORDS > 1 ? $clog2(WORDS) : 1;
  localparam int LANE_W = $clog2(LANES);

  `CHECK(DIM % LANES == 0, "gemv_qk: DIM must be a multiple of LANES")
  `CHECK(ACC_W >= 81 + $clog2(DIM), "gemv_qk: ACC_W must be 81 + log2(DIM) at least")

  logic [WORD_W-1:0] base_in, word;  // words of the queries of one beat are adjacent
  logic [LANE_W-1:0] lane_in;
  logic [ID_W-1:0] head_in, head;
  logic loaded, issue, ready, started;
  logic [16*LANES-1:0] held;

  assign s_q_tready = 1'b1;
  assign issue = loaded && s_k_tvalid;
  assign s_k_tready = loaded && ready && head == Q_HEADS - 1;

  genvar i;
  generate
    for (i = 0; i < LANES; i = i + 1) begin : g_lane
      logic [15:0] store [0:WORDS-1];
      always_ff @(posedge clk) if (s_q_tvalid && lane_in == i) store[base_in + head_in] <= s_q_tdata;
      assign held[16*i +: 16] = store[word];
    end
  endgenerate

  always_ff @(posedge clk) begin
    if (s_q_tvalid) begin
      loaded <= s_q_tlast;
      head_in <= head_in + 1'b1;
      if (head_in == Q_HEADS - 1) begin
        head_in <= '0;
        lane_in <= lane_in + 1'b1;
        if (lane_in == LANES - 1) base_in <= base_in + Q_HEADS[WORD_W-1:0];
      end
      if (s_q_tlast) begin
        head_in <= '0;
        lane_in <= '0;
        base_in <= '0;
      end
    end
    if (issue && ready) begin
      head <= head + 1'b1;
      word <= word + 1'b1;
      if (head == Q_HEADS - 1) begin
        head <= '0;
        started <= !s_k_tlast;
        if (s_k_tlast) word <= '0;
      end
    end
    if (rst) begin
      loaded  <= 1'b0;
      started <= 1'b0;
      head_in <= '0;
      lane_in <= '0;
      base_in <= '0;
      head    <= '0;
      word    <= '0;
    end
  end

  fp16_dot #(.LANES(LANES), .CONTEXTS(Q_HEADS), .ACC_W(ACC_W)) dot (
      .clk(clk), .rst(rst), .s_tvalid(issue), .s_tready(ready), .s_tdata({s_k_tdata, held}), .s_tid(head),
      .s_tuser(!started), .s_tlast(s_k_tlast), .m_tvalid(m_tvalid), .m_tready(m_tready), .m_tdata(m_tdata),
      .m_tid(m_tid), .m_tuser(m_tuser));
endmodule
