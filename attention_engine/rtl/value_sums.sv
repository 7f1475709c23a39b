`include "check.svh"

// Weighted sums of value pages for Q_HEADS queries, before the inverse rotation (`golden_progressive.py`).
//
// s_w: 7-bit weights, one word for each block of 32 / V_BITS tokens and query, query by query; s_w_tuser: the power of
// two of the page's weights for that query, 0 to 32, constant over its words; s_w_tlast ends a page. s_page: full
// pages, 16 bytes per beat; s_page_tlast ends a page. Constant over the beats of a page: s_page_tuser: {last page,
// first page, tokens}, s_page_tdest: one of PARTS pages of channels. The first HEAD beats, the sizes of tokens, are
// skipped. Lines of codes follow, one for each block and 16 of DIM channels; lines after the last token are skipped. m:
// after the last page, query by query (m_tid), the sum of each channel over pages of (2 x sum of weight x code -
// (2^V_BITS - 1) x sum of weights) << power; m_tlast ends it.
//
// A beat of a line takes Q_HEADS cycles, after the weights of its block have arrived; those of the next block arrive at
// the same time. All pages of a run start with the first pages of all parts, in any order. No lines are accepted during
// the output of sums.
module value_sums #(
    parameter int DIM = 64,
    parameter int PARTS = 1,
    parameter int V_BITS = 2,
    parameter int Q_HEADS = 1,
    parameter int HEAD = 28,
    parameter int BLOCK = 32 / V_BITS,
    parameter int ID_W = Q_HEADS > 1 ? $clog2(Q_HEADS) : 1,
    parameter int PART_W = PARTS > 1 ? $clog2(PARTS) : 1
) (
    input  logic               clk,
    input  logic               rst,
    input  logic               s_w_tvalid,
    output logic               s_w_tready,
    input  logic [7*BLOCK-1:0] s_w_tdata,
    input  logic [5:0]         s_w_tuser,
    input  logic               s_w_tlast,
    input  logic               s_page_tvalid,
    output logic               s_page_tready,
    input  logic [127:0]       s_page_tdata,
    input  logic [10:0]        s_page_tuser,
    input  logic [PART_W-1:0]  s_page_tdest,
    input  logic               s_page_tlast,
    output logic               m_tvalid,
    input  logic               m_tready,
    output logic [63:0]        m_tdata,
    output logic [ID_W-1:0]    m_tid,
    output logic               m_tlast
);
  localparam int COEF_W = V_BITS == 2 ? 8 : 10;
  localparam int DOT_W = COEF_W + 6;
  localparam int SUM_W = 21;       // sum of a page: at most 15 x 127 x 256
  localparam int WEIGH_W = 15;     // sum of its weights: 127 x 256
  localparam int TOTAL_W = 64;
  localparam int BEATS = DIM / 4;  // beats of a block
  localparam int BEAT_W = $clog2(BEATS);
  localparam int HOLD_W = 6 + WEIGH_W + 7 * BLOCK;  // block data of a query: power, previous weights, weights
  localparam int WORD_W = PART_W + BEAT_W + ID_W;   // {part, beat, query} of totals

  `CHECK(DIM % 16 == 0 && DIM >= 16 && DIM <= 128, "value_sums: DIM must be a multiple of 16, at most 128")
  `CHECK(V_BITS == 2 || V_BITS == 4, "value_sums: V_BITS must be 2 or 4")
  `CHECK(Q_HEADS >= 1 && Q_HEADS <= 8, "value_sums: Q_HEADS must be 1 to 8")
  `CHECK(PARTS >= 1 && DIM * PARTS <= 128, "value_sums: DIM x PARTS must be 128 at most")
  `CHECK(HEAD >= 4 && HEAD <= 32, "value_sums: HEAD must be 4 to 32")

  genvar i;

  // --- input of weights: a block of all queries in one of two buffers, with the sum of weights up to it

  logic [HOLD_W-1:0] holds [0:(2<<ID_W)-1];  // {half, query}
  logic [WEIGH_W-1:0] weighs [0:(1<<ID_W)-1];
  logic half_in, load, load_last, first_in;
  logic [1:0] held, usable;  // full halves, and usable halves
  logic [ID_W-1:0] head_in, head_1, head_2;
  logic [7*BLOCK-1:0] word_1, word_2;
  logic [5:0] power_1, power_2;
  logic [4*9-1:0] four_1;
  logic [10:0] lanes_2;
  logic [2:0] loads, load_lasts;
  logic half_1, half_2, first_1, first_2;
  logic [WEIGH_W-1:0] weigh_2;

  assign s_w_tready = !held[half_in];
  assign load = s_w_tvalid && s_w_tready;
  assign load_last = head_in == ID_W'(Q_HEADS - 1);
  assign weigh_2 = (first_2 ? '0 : weighs[head_2]) + WEIGH_W'(lanes_2);

  generate
    for (i = 0; i < 4; i = i + 1) begin : g_four
      if (BLOCK == 16) begin : g_more
        always_ff @(posedge clk)
          four_1[9*i +: 9] <= 9'(s_w_tdata[28*i +: 7]) + 9'(s_w_tdata[28*i+7 +: 7]) + 9'(s_w_tdata[28*i+14 +: 7])
              + 9'(s_w_tdata[28*i+21 +: 7]);
      end else begin : g_less
        always_ff @(posedge clk) four_1[9*i +: 9] <= 9'(s_w_tdata[14*i +: 7]) + 9'(s_w_tdata[14*i+7 +: 7]);
      end
    end
  endgenerate

  always_ff @(posedge clk) begin
    loads <= {loads[1:0], load};
    load_lasts <= {load_lasts[1:0], load && load_last};
    {word_1, power_1, head_1, half_1, first_1} <= {s_w_tdata, s_w_tuser, head_in, half_in, first_in};
    {word_2, power_2, head_2, half_2, first_2} <= {word_1, power_1, head_1, half_1, first_1};
    lanes_2 <= 11'(four_1[0 +: 9]) + 11'(four_1[9 +: 9]) + 11'(four_1[18 +: 9]) + 11'(four_1[27 +: 9]);
    if (loads[1]) begin
      weighs[head_2] <= weigh_2;
      holds[{half_2, head_2}] <= {power_2, weigh_2, word_2};
    end
    if (load) begin
      head_in <= load_last ? '0 : head_in + 1'b1;
      if (load_last) begin
        half_in <= !half_in;
        first_in <= s_w_tlast;
      end
    end
    if (rst) begin
      half_in <= 1'b0;
      first_in <= 1'b1;
      head_in <= '0;
      loads <= '0;
      load_lasts <= '0;
    end
  end

  // --- lines: weights of the block, four channels per beat and query; sums are complete in the last block of a page

  localparam int WORK = 4;
  localparam int WORK_W = BEAT_W + ID_W + PART_W + 3;  // beat, query, part, first and last block, first page
  localparam int LEFT_W = $clog2(256 / BLOCK * BEATS + 1);  // a page has at most 256 tokens
  logic [4:0] beat_head;
  logic lines_in, take, needed, issue, work_head_last, block_ends, block_first, block_last, half_work, page_first, page_last;
  logic [LEFT_W-1:0] lines_left;
  logic [8:0] blocks;
  logic [BEAT_W-1:0] beat;
  logic [ID_W-1:0] work_head;
  logic [HOLD_W-1:0] hold;
  logic [16*COEF_W-1:0] coefs, coefs_1;
  logic [127:0] beat_1;
  logic [WORK-1:0] work;
  logic [WORK*WORK_W-1:0] infos;
  logic [WORK*6-1:0] powers;
  logic [WORK*WEIGH_W-1:0] weights;
  logic [4*DOT_W-1:0] dots;
  logic [4*SUM_W-1:0] acc, acc_next;
  logic [4*SUM_W-1:0] accs [0:(1<<(BEAT_W+ID_W))-1];
  logic [WORK_W-1:0] info;
  logic acc_first, acc_last, draining;

  assign {page_last, page_first} = s_page_tuser[10:9];
  assign blocks = (s_page_tuser[8:0] + 9'(BLOCK - 1)) / 9'(BLOCK);
  assign needed = lines_left != '0;
  assign s_page_tready = !lines_in || !needed || (issue && work_head_last);
  assign take = s_page_tvalid && s_page_tready;
  assign work_head_last = work_head == ID_W'(Q_HEADS - 1);
  assign issue = s_page_tvalid && lines_in && needed && usable[half_work] && !draining;
  assign block_ends = issue && work_head_last && beat == BEAT_W'(BEATS - 1);
  assign block_last = lines_left <= LEFT_W'(BEATS);
  assign hold = holds[{half_work, work_head}];
  assign info = infos[(WORK-1)*WORK_W +: WORK_W];
  assign {acc_first, acc_last} = info[2:1];
  assign acc = accs[info[PART_W+3 +: BEAT_W+ID_W]];

  digit_dots #(.COEF_W(COEF_W)) dotting (.clk(clk), .digits(beat_1), .coefs(coefs_1), .sums(dots));

  generate
    for (i = 0; i < 16; i = i + 1) begin : g_coef
      if (V_BITS == 2) begin : g_two
        assign coefs[8*i +: 8] = {1'b0, hold[7*i +: 7]};
      end else if (i / 4 % 2 == 0) begin : g_low
        assign coefs[10*i +: 10] = {3'b0, hold[7*(4*(i/8)+i%4) +: 7]};
      end else begin : g_high
        assign coefs[10*i +: 10] = {1'b0, hold[7*(4*(i/8)+i%4) +: 7], 2'b0};
      end
    end
    for (i = 0; i < 4; i = i + 1) begin : g_acc
      assign acc_next[SUM_W*i +: SUM_W] = (acc_first ? '0 : acc[SUM_W*i +: SUM_W]) + SUM_W'(dots[DOT_W*i +: DOT_W]);
    end
  endgenerate

  always_ff @(posedge clk) begin
    if (take) begin
      if (!lines_in) begin
        beat_head <= beat_head + 1'b1;
        if (beat_head == 5'(HEAD - 1)) lines_in <= 1'b1;
        lines_left <= LEFT_W'(blocks * BEATS);
        block_first <= 1'b1;
      end else if (needed) lines_left <= lines_left - 1'b1;
      if (s_page_tlast) begin
        beat_head <= '0;
        lines_in <= 1'b0;
      end
    end
    if (issue) begin
      work_head <= work_head_last ? '0 : work_head + 1'b1;
      if (work_head_last) beat <= beat == BEAT_W'(BEATS - 1) ? '0 : beat + 1'b1;
    end
    if (block_ends) begin
      block_first <= 1'b0;
      half_work <= !half_work;
    end
    held <= (held | {load && load_last && half_in, load && load_last && !half_in})
        & ~{block_ends && half_work, block_ends && !half_work};
    usable <= (usable | {load_lasts[1] && half_2, load_lasts[1] && !half_2})
        & ~{block_ends && half_work, block_ends && !half_work};
    beat_1 <= s_page_tdata;
    coefs_1 <= coefs;
    work <= {work[WORK-2:0], issue};
    infos <= {infos[(WORK-1)*WORK_W-1:0], beat, work_head, s_page_tdest, block_first, block_last, page_first};
    powers <= {powers[(WORK-1)*6-1:0], hold[HOLD_W-1 -: 6]};
    weights <= {weights[(WORK-1)*WEIGH_W-1:0], hold[7*BLOCK +: WEIGH_W]};
    if (work[WORK-1]) accs[info[PART_W+3 +: BEAT_W+ID_W]] <= acc_next;
    if (rst) begin
      beat_head <= '0;
      {lines_in, half_work} <= 2'b00;
      work_head <= '0;
      beat <= '0;
      held <= '0;
      usable <= '0;
      work <= '0;
    end
  end

  // --- addition of the sums of a page to the totals, shifted by their power of two

  localparam int ADD = 5;
  localparam int AT_W = WORD_W + 1;
  logic [ADD-1:0] add;
  logic [ADD*AT_W-1:0] words;  // {part, beat, query}, first page
  logic [4*SUM_W-1:0] acc_5, sum_6;
  logic [WEIGH_W+3:0] least_5;
  logic [5:0] power_5, power_6;
  logic [2:0] coarse_7;
  logic [4*(SUM_W+7)-1:0] fine_7;
  logic [4*TOTAL_W-1:0] moved_8, read, read_8, total_9;
  (* ram_style = "block" *) logic [4*TOTAL_W-1:0] totals [0:(1<<WORD_W)-1];
  logic [WORD_W-1:0] read_at, drain_at;
  logic read_en, idle;

  assign idle = work == '0 && add == '0;
  assign read_en = !idle || drain_read;
  assign read_at = idle ? drain_at : words[AT_W+1 +: WORD_W];

  generate
    for (i = 0; i < 4; i = i + 1) begin : g_total
      always_ff @(posedge clk) begin
        sum_6[SUM_W*i +: SUM_W] <= {acc_5[SUM_W*i +: SUM_W-1], 1'b0} - SUM_W'(least_5);
        fine_7[(SUM_W+7)*i +: SUM_W+7] <= (SUM_W+7)'($signed(sum_6[SUM_W*i +: SUM_W])) << power_6[2:0];
        moved_8[TOTAL_W*i +: TOTAL_W] <= TOTAL_W'($signed(fine_7[(SUM_W+7)*i +: SUM_W+7])) << {coarse_7, 3'b0};
        total_9[TOTAL_W*i +: TOTAL_W] <= (words[3*AT_W] ? '0 : read_8[TOTAL_W*i +: TOTAL_W]) + moved_8[TOTAL_W*i +: TOTAL_W];
      end
    end
  endgenerate

  always_ff @(posedge clk) begin
    add <= {add[ADD-2:0], work[WORK-1] && acc_last};
    words <= {words[(ADD-1)*AT_W-1:0], info[3 +: PART_W], info[PART_W+3 +: BEAT_W+ID_W], info[0]};
    acc_5 <= acc_next;
    least_5 <= ((WEIGH_W+4)'(weights[(WORK-1)*WEIGH_W +: WEIGH_W]) << V_BITS) - (WEIGH_W+4)'(weights[(WORK-1)*WEIGH_W +: WEIGH_W]);
    power_5 <= powers[(WORK-1)*6 +: 6];
    power_6 <= power_5;
    coarse_7 <= power_6[5:3];
    if (read_en) read <= totals[read_at];
    read_8 <= read;  // memory and adder take two cycles
    if (add[4]) totals[words[4*AT_W+1 +: WORD_W]] <= total_9;
    if (rst) add <= '0;
  end

  // --- output of totals

  logic [ID_W-1:0] next_head, read_head, word_head;
  logic [PART_W-1:0] next_part;
  logic [BEAT_W-1:0] next_beat;
  logic drain_read, more, arrived, full, next_last, read_last, word_last;
  logic [1:0] lane;
  logic [4*TOTAL_W-1:0] word;

  assign drain_at = {next_part, next_beat, next_head};
  assign next_last = next_head == ID_W'(Q_HEADS - 1) && next_part == PART_W'(PARTS - 1) && next_beat == BEAT_W'(BEATS - 1);
  assign drain_read = draining && more && (!arrived || (!full || (m_tready && lane == 2'd3))) && idle;
  assign m_tvalid = full;
  assign m_tdata = word[TOTAL_W*lane +: TOTAL_W];
  assign m_tid = word_head;
  assign m_tlast = word_last && lane == 2'd3;

  always_ff @(posedge clk) begin
    if (block_ends && block_last && page_last) {draining, more} <= 2'b11;
    if (m_tvalid && m_tready) begin
      lane <= lane + 1'b1;
      if (lane == 2'd3) full <= 1'b0;
      if (m_tlast) draining <= 1'b0;
    end
    if (arrived && (!full || (m_tready && lane == 2'd3))) begin
      word <= read;
      word_head <= read_head;
      word_last <= read_last;
      full <= 1'b1;
      arrived <= 1'b0;
    end
    if (drain_read) begin
      arrived <= 1'b1;
      read_head <= next_head;
      read_last <= next_last;
      next_beat <= next_beat == BEAT_W'(BEATS - 1) ? '0 : next_beat + 1'b1;
      if (next_beat == BEAT_W'(BEATS - 1)) begin
        next_part <= next_part == PART_W'(PARTS - 1) ? '0 : next_part + 1'b1;
        if (next_part == PART_W'(PARTS - 1)) next_head <= next_last ? '0 : next_head + 1'b1;
      end
      if (next_last) more <= 1'b0;
    end
    if (rst) begin
      {draining, more, arrived, full} <= '0;
      lane <= '0;
      next_head <= '0;
      next_part <= '0;
      next_beat <= '0;
    end
  end
endmodule
