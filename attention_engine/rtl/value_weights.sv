`include "check.svh"

// 7-bit weights of the tokens of a value page: w x size under one power of two for each query
// (`golden_progressive.py`).
//
// A page: s_size, its sizes, FP16, 8 per beat, HEAD beats; s_w: weights w of all queries token by token, each sig x
// 2^(lift - 24) with a 17-bit sig; s_w_tlast ends the page. m: one word of weights for each block of BLOCK tokens and
// query, zeros after the last token; m_tuser: the power of two, 0 to 32; m_tlast ends the page. `bad`: a size is NaN,
// infinite or negative; it is then zero. Sizes of the next page are accepted during the output of the current page.
//
// The unit makes two passes over a page, each with one cycle per token and query: products, then words after their
// maximum is known.
module value_weights #(
    parameter int Q_HEADS = 1,
    parameter int HEAD = 28,
    parameter int BLOCK = 16,
    parameter int ID_W = Q_HEADS > 1 ? $clog2(Q_HEADS) : 1
) (
    input  logic               clk,
    input  logic               rst,
    input  logic               s_size_tvalid,
    output logic               s_size_tready,
    input  logic [127:0]       s_size_tdata,
    input  logic               s_w_tvalid,
    output logic               s_w_tready,
    input  logic [16:0]        s_w_sig,
    input  logic [4:0]         s_w_lift,
    input  logic               s_w_tlast,
    output logic               m_tvalid,
    input  logic               m_tready,
    output logic [7*BLOCK-1:0] m_tdata,
    output logic [5:0]         m_tuser,
    output logic               m_tlast,
    output logic               bad
);
  `include "fp16.svh"

  localparam int MIN_TOP = 32;
  localparam int BLOCK_W = $clog2(BLOCK);
  localparam int T_W = 8;  // bits of a token index in its page

  `CHECK(Q_HEADS >= 1 && Q_HEADS <= 8, "value_weights: Q_HEADS must be 1 to 8")
  `CHECK(BLOCK == 8 || BLOCK == 16, "value_weights: BLOCK must be 8 or 16")
  `CHECK(HEAD >= 4 && HEAD <= 32, "value_weights: HEAD must be 4 to 32")

  genvar i;

  // --- input of sizes

  logic [127:0] sizes [0:31];
  logic [4:0] size_at;
  logic sizes_in, size_take;

  assign s_size_tready = !sizes_in;
  assign size_take = s_size_tvalid && s_size_tready;

  // --- products: the leading 8 bits and their position

  logic weighed, take, head_last;  // all weights have arrived
  logic [ID_W-1:0] head;
  logic [T_W-1:0] token, token_last;
  logic [127:0] size_word;
  logic [15:0] size_1;
  logic [16:0] sig_1;
  logic [4:0] lift_1;
  logic [10:0] size_sig_2;
  logic [16:0] sig_2;
  logic [5:0] lift_2, shift_2, lift_3;
  logic [27:0] raw, normal;
  logic [4:0] zeros;
  logic [3*6-1:0] lifts;
  logic [6:0] place;
  logic [7:0] lead;
  logic [6:0] go;
  logic [7*(T_W+ID_W)-1:0] ats;
  logic [T_W+ID_W-1:0] at;
  logic [14:0] products [0:(1<<(T_W+ID_W))-1];  // {token, query}
  logic [6:0] tops [0:Q_HEADS-1];
  logic negative_1, begins;

  assign s_w_tready = sizes_in && !weighed;
  assign take = s_w_tvalid && s_w_tready;
  assign head_last = head == ID_W'(Q_HEADS - 1);
  assign size_word = sizes[token[7:3]];
  assign negative_1 = size_1[15] && size_1[14:0] != '0;
  assign at = ats[6*(T_W+ID_W) +: T_W+ID_W];
  assign begins = take && token == '0 && head == '0;

  normalize #(.W(28)) norm (.clk(clk), .en(1'b1), .value(raw), .normal(normal), .zeros(zeros));

  generate
    for (i = 0; i < Q_HEADS; i = i + 1) begin : g_top
      always_ff @(posedge clk) begin
        if (go[6] && at[ID_W-1:0] == ID_W'(i) && lead[7] && place > tops[i]) tops[i] <= place;
        if (begins) tops[i] <= 7'(MIN_TOP);
      end
    end
  endgenerate

  always_ff @(posedge clk) begin
    bad <= 1'b0;
    if (size_take) begin
      sizes[size_at] <= s_size_tdata;
      size_at <= size_at == 5'(HEAD - 1) ? '0 : size_at + 1'b1;
      if (size_at == 5'(HEAD - 1)) sizes_in <= 1'b1;
    end
    if (take) begin
      head <= head_last ? '0 : head + 1'b1;
      if (head_last) token <= s_w_tlast ? '0 : token + 1'b1;
      if (s_w_tlast) begin
        sizes_in <= 1'b0;
        weighed <= 1'b1;
        token_last <= token;
      end
    end
    go <= {go[5:0], take};
    ats <= {ats[6*(T_W+ID_W)-1:0], token, head};
    size_1 <= size_word[16*token[2:0] +: 16];
    {sig_1, lift_1} <= {s_w_sig, s_w_lift};
    if (go[0] && (fp16_bad(size_1) || negative_1)) bad <= 1'b1;
    size_sig_2 <= negative_1 ? '0 : fp16_sig(size_1);
    shift_2 <= {1'b0, fp16_shift(size_1)};
    {sig_2, lift_2} <= {sig_1, 1'b0, lift_1};
    raw <= sig_2 * size_sig_2;
    lift_3 <= lift_2 + shift_2;
    lifts <= {lifts[11:0], lift_3};
    place <= 7'd28 + {1'b0, lifts[17:12]} - {2'b0, zeros};
    lead <= normal[27:20];
    if (go[6]) products[at] <= {lead, place};
    if (words_out) weighed <= 1'b0;
    if (rst) begin
      size_at <= '0;
      {sizes_in, weighed, bad} <= 3'b000;
      head <= '0;
      token <= '0;
      go <= '0;
    end
  end

  // --- words: block by block and query by query, token by token

  logic reading, en, word_last, block_end, read_head_last, words_out;
  logic [BLOCK_W-1:0] lane;
  logic [T_W-BLOCK_W-1:0] block;
  logic [ID_W-1:0] read_head;
  logic [14:0] product_1;
  logic [6:0] top_1, top_2, top_3, down_2;
  logic [7:0] lead_2;
  logic inside_1, inside_2;
  logic [2:0] turn, ends, lasts;
  logic [7:0] half_3;  // a weight and half a unit
  logic [7*BLOCK-1:0] word;
  logic [6:0] weight_3;

  assign en = m_tready || !m_tvalid;
  assign read_head_last = read_head == ID_W'(Q_HEADS - 1);
  assign block_end = lane == BLOCK_W'(BLOCK - 1);
  assign word_last = block_end && read_head_last && block == token_last[T_W-1:BLOCK_W];
  assign words_out = m_tvalid && m_tready && m_tlast;
  assign weight_3 = half_3 == 8'hFF ? 7'd127 : 7'((half_3 + 8'd1) >> 1);

  always_ff @(posedge clk) begin
    if (weighed && go == '0 && !reading && turn == '0 && !m_tvalid) reading <= 1'b1;
    if (en) begin
      turn <= {turn[1:0], reading};
      ends <= {ends[1:0], block_end};
      lasts <= {lasts[1:0], word_last};
      product_1 <= products[{block, lane, read_head}];
      inside_1 <= {block, lane} <= token_last;
      top_1 <= tops[read_head];
      down_2 <= top_1 - product_1[6:0];
      lead_2 <= product_1[14:7];
      inside_2 <= inside_1;
      half_3 <= inside_2 && lead_2[7] && down_2 < 7'd8 ? lead_2 >> down_2[2:0] : '0;
      {top_2, top_3} <= {top_1, top_2};
      if (turn[2]) word <= {weight_3, word[7*BLOCK-1:7]};
      m_tvalid <= turn[2] && ends[2];
      if (turn[2] && ends[2]) begin
        m_tdata <= {weight_3, word[7*BLOCK-1:7]};
        m_tuser <= 6'(top_3 - 7'(MIN_TOP));
        m_tlast <= lasts[2];
      end
      if (reading) begin
        lane <= lane + 1'b1;
        if (block_end) begin
          read_head <= read_head_last ? '0 : read_head + 1'b1;
          if (read_head_last) block <= word_last ? '0 : block + 1'b1;
        end
        if (word_last) reading <= 1'b0;
      end
    end
    if (rst) begin
      reading <= 1'b0;
      lane <= '0;
      block <= '0;
      read_head <= '0;
      turn <= '0;
      m_tvalid <= 1'b0;
    end
  end
endmodule
