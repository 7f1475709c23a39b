`include "check.svh"

// Approximate logits from pages that have K as planes of bits: q of Q_HEADS queries is held, pages stream by.
//
// s_q: q of a channel's queries, then of the next channel's, FP16; s_q_tlast ends it. It is taken while no page is at
// work, and counts for the pages that follow. s_page: whole pages, a block of 16 bytes a beat, s_page_tlast ends one;
// s_page_tuser: its tokens, the same on all its beats. A page has for each channel a scale and a least value, FP16, and
// a width of 0 to 8 bits; then rows of four planes of the channels' bits, lowest first, for blocks of 32 tokens: byte i
// has token i in its low and token 16 + i in its high nibble. m: query by query (m_tid) the score of each token, 32 bits
// with 20 behind the point; m_tuser: {saturated, NaN or infinity met or widths that cannot be}; m_tlast ends a page.
//
// A block of a row is used Q_HEADS cycles, any other one: what has no plane passes by. While rows stream, coefficients
// of the next ones are made, and the scores of the page before are given out.
module plane_scores #(
    parameter int DIM = 64,
    parameter int Q_HEADS = 1,
    parameter int PAGE_BYTES = 4096,
    parameter int SCALE_MANT = 12101741,
    parameter int SCALE_EXP = 26,
    parameter int ID_W = Q_HEADS > 1 ? $clog2(Q_HEADS) : 1
) (
    input  logic            clk,
    input  logic            rst,
    input  logic            s_q_tvalid,
    output logic            s_q_tready,
    input  logic [15:0]     s_q_tdata,
    input  logic            s_q_tlast,
    input  logic            s_page_tvalid,
    output logic            s_page_tready,
    input  logic [127:0]    s_page_tdata,
    input  logic [8:0]      s_page_tuser,
    input  logic            s_page_tlast,
    output logic            m_tvalid,
    input  logic            m_tready,
    output logic [31:0]     m_tdata,
    output logic [ID_W-1:0] m_tid,
    output logic [1:0]      m_tuser,
    output logic            m_tlast
);
  `include "fp16.svh"

  localparam int FIT = (PAGE_BYTES - 5 * DIM) / (8 * DIM);  // blocks of a row that a page has room for
  localparam int BLOCKS = FIT > 8 ? 8 : FIT < 1 ? 1 : FIT;
  localparam int ROWS = (PAGE_BYTES - 5 * DIM) / (16 * BLOCKS);
  localparam int FRAC = 26;         // bits behind the point, of coefficients and sums
  localparam int SIZE_W = 12 + FRAC;
  localparam int COEF_W = SIZE_W + 1;
  localparam int SUM_W = COEF_W + $clog2(4 * ROWS + DIM);  // no sum of all coefficients and products exceeds it
  localparam int C_W = $clog2(DIM + 1);
  localparam int CH_W = $clog2(DIM);
  localparam int P_W = $clog2(8 * DIM + 5);
  localparam int ROW_W = $clog2(ROWS + 1);
  localparam int WORD_W = ROW_W + ID_W;  // {row, query} of coefficients
  localparam int ADDR_W = 3 + ID_W;      // {block, query} of sums
  localparam int GAP = BLOCKS * Q_HEADS < 3 ? 3 - BLOCKS * Q_HEADS : 0;  // a sum is back after three cycles
  localparam int MAKE = 6;  // cycles of a product, its operands' memory included
  localparam logic [1:0] SCALES = 2'd0, LEASTS = 2'd1, WIDTHS = 2'd2, PLANES = 2'd3;

  `CHECK(DIM % 16 == 0 && DIM >= 16 && DIM <= 128, "plane_scores: DIM must be a multiple of 16, at most 128")
  `CHECK(Q_HEADS >= 1 && Q_HEADS <= 8, "plane_scores: Q_HEADS must be 1 to 8")
  `CHECK(FIT >= 1 && PAGE_BYTES % 16 == 0, "plane_scores: PAGE_BYTES must be whole blocks, and hold 32 tokens")

  // --- q comes in, scaled by log2(e) / sqrt(d): {sign, shift, sig}, worth sig x 2^(shift - 13 - SCALE_EXP)

  logic [CH_W-1:0] q_channel;
  logic [ID_W-1:0] q_head;
  logic q_take, q_first, q_1, q_2, loaded, q_bad, busy;
  logic [CH_W+ID_W-1:0] q_addr_1, q_addr_2;
  logic [15:0] q_value;
  logic [5:0] q_sign_shift;
  logic [34:0] q_raw;
  logic [29:0] q_store [0:(1<<(CH_W+ID_W))-1];
  logic [29:0] q_copy [0:(1<<(CH_W+ID_W))-1];  // the same for the second product
  logic [29:0] q_word;

  assign s_q_tready = !busy;
  assign q_take = s_q_tvalid && s_q_tready;
  assign q_first = q_channel == '0 && q_head == '0;
  assign q_word = {q_sign_shift, 24'((q_raw + 35'd1024) >> 11)};

  always_ff @(posedge clk) begin
    q_1 <= q_take;
    q_value <= s_q_tdata;
    q_addr_1 <= {q_channel, q_head};
    q_2 <= q_1;
    q_raw <= fp16_sig(q_value) * 24'(SCALE_MANT);
    q_sign_shift <= {q_value[15], fp16_shift(q_value)};
    q_addr_2 <= q_addr_1;
    if (q_2) begin
      q_store[q_addr_2] <= q_word;
      q_copy[q_addr_2] <= q_word;
    end
    if (q_take) begin
      q_head <= q_head == ID_W'(Q_HEADS - 1) ? '0 : q_head + 1'b1;
      if (q_head == ID_W'(Q_HEADS - 1)) q_channel <= q_channel + 1'b1;
      if (s_q_tlast) q_channel <= '0;
      loaded <= s_q_tlast;
      q_bad <= (q_bad && !q_first) || fp16_bad(s_q_tdata);
    end
    if (rst) begin
      {q_1, q_2, loaded} <= 3'b000;
      q_head <= '0;
      q_channel <= '0;
    end
  end

  // --- a page's blocks: what they are, and where they go

  logic [1:0] section;
  logic [3:0] block, block_end;
  logic [ROW_W-1:0] row, row_end;
  logic take, block_last, begins, told, needed, issue, head_last, generated;
  logic [ID_W-1:0] head;
  logic [127:0] scales [0:DIM/8-1];
  logic [127:0] leasts [0:DIM/8-1];
  logic [63:0] widths [0:DIM/16-1];
  logic [63:0] widths_now;
  logic [15:0] wide;
  logic [4:0] leasts_in, widths_in;
  genvar i;

  assign block_end = section == PLANES ? 4'(BLOCKS - 1) : section == WIDTHS ? 4'(DIM / 16 - 1) : 4'(DIM / 8 - 1);
  assign block_last = block == block_end;
  assign take = s_page_tvalid && s_page_tready;
  // Each as its own section takes it: what is cleared for a page does not wait for the rows' ready
  assign begins = s_page_tvalid && section == LEASTS && block == '0 && loaded && !busy;
  assign told = s_page_tvalid && section == WIDTHS;
  assign needed = row <= row_end;
  // New scales do not touch what is at work; from the least values on all belongs to the new page
  assign s_page_tready = section == SCALES ? generated
      : section == LEASTS ? loaded && (!busy || block != '0)
      : section == WIDTHS || !needed || (issue && head_last);

  generate
    for (i = 0; i < 16; i = i + 1) begin : g_width
      assign wide[i] = s_page_tdata[8*i +: 8] > 8'd8;
      assign widths_now[4*i +: 4] = wide[i] ? 4'd8 : s_page_tdata[8*i +: 4];
    end
  endgenerate

  always_ff @(posedge clk) begin
    if (take) begin
      block <= block_last ? '0 : block + 1'b1;
      if (block_last) begin
        if (section != PLANES) section <= section + 1'b1;
        else if (row != ROW_W'(ROWS)) row <= row + 1'b1;
      end
      if (section == SCALES) scales[block] <= s_page_tdata;
      if (section == LEASTS) leasts[block] <= s_page_tdata;
      if (section == WIDTHS) widths[block[2:0]] <= widths_now;
      if (section == LEASTS) leasts_in <= begins ? 5'd1 : leasts_in + 1'b1;
      if (section == WIDTHS) widths_in <= widths_in + 1'b1;
      if (begins) widths_in <= '0;
      if (s_page_tlast) begin
        section <= SCALES;
        block <= '0;
        row <= '0;
      end
    end
    if (rst) begin
      section <= SCALES;
      block <= '0;
      row <= '0;
    end
  end

  // How many planes there are: the last row that has one; a page without any has one row of none
  logic [4*6-1:0] fours;
  logic [1:0] summing;  // a block's widths are added; the last row is known
  logic [P_W-1:0] planes;

  generate
    for (i = 0; i < 4; i = i + 1) begin : g_four
      always_ff @(posedge clk)
        fours[6*i +: 6] <= 6'(widths_now[16*i +: 4]) + 6'(widths_now[16*i+4 +: 4]) + 6'(widths_now[16*i+8 +: 4])
            + 6'(widths_now[16*i+12 +: 4]);
    end
  endgenerate

  always_ff @(posedge clk) begin
    summing <= {summing[0], told};
    if (begins) planes <= '0;
    else if (summing[0]) planes <= planes + P_W'(fours[0 +: 6]) + P_W'(fours[6 +: 6]) + P_W'(fours[12 +: 6]) + P_W'(fours[18 +: 6]);
    row_end <= 32'(planes) > 4 * ROWS ? ROW_W'(ROWS - 1) : planes == '0 ? '0 : ROW_W'((planes - 1'b1) >> 2);
    if (rst) summing <= '0;
  end

  // --- coefficients: channel by channel, those without bits left out, and at the end one of four planes of none

  logic [C_W-1:0] channel_next, channel;
  logic [63:0] width_word;
  logic [3:0] width_next, width, planes_now;
  logic generating, fetch, have, blank, half, more, spent;
  logic [ID_W-1:0] make_head;
  logic [P_W-1:0] plane;
  logic [127:0] scale_word;
  logic [15:0] scale;
  logic [29:0] scale_q;
  logic [MAKE-1:0] making;
  logic made_1;  // the last query's coefficients are being written
  localparam int INFO_W = P_W + ID_W + 5;
  logic [MAKE*INFO_W-1:0] infos;  // plane, query, the last one, bits before, planes

  assign width_word = widths[channel_next[CH_W-1:0] >> 4];
  assign width_next = width_word[4*channel_next[3:0] +: 4];
  assign fetch = generating && (channel_next == C_W'(DIM) || 5'(channel_next >> 4) < widths_in) && (!have || spent);
  assign more = width > 4'd4 && !half;
  assign planes_now = more ? 4'd4 : half ? width - 4'd4 : width;
  assign spent = have && make_head == ID_W'(Q_HEADS - 1) && !more;
  assign generated = !generating && !have && making == '0 && !made_1;
  assign scale_word = scales[channel[CH_W-1:0] >> 3];

  always_ff @(posedge clk) begin
    if (fetch) begin
      have <= channel_next == C_W'(DIM) || width_next != '0;
      channel <= channel_next;
      width <= channel_next == C_W'(DIM) ? 4'd4 : width_next;
      blank <= channel_next == C_W'(DIM);
      channel_next <= channel_next + 1'b1;
      if (channel_next == C_W'(DIM)) generating <= 1'b0;
    end else if (spent) have <= 1'b0;
    if (have) begin
      make_head <= make_head + 1'b1;
      if (make_head == ID_W'(Q_HEADS - 1)) begin
        make_head <= '0;
        half <= more;
        plane <= plane + P_W'(planes_now);
      end
    end
    scale <= blank ? '0 : scale_word[16*channel[2:0] +: 16];
    scale_q <= q_store[{channel[CH_W-1:0], make_head}];
    making <= {making[MAKE-2:0], have};
    infos <= {infos[(MAKE-1)*INFO_W-1:0], plane, make_head, make_head == ID_W'(Q_HEADS - 1), half, planes_now[2:0]};
    if (begins) begin
      channel_next <= '0;
      plane <= '0;
      generating <= 1'b1;
    end
    if (rst) begin
      {generating, have, half} <= 3'b000;
      make_head <= '0;
      making <= '0;
    end
  end

  logic [SIZE_W-1:0] coef_size;
  logic coef_sign, coef_over, coef_bad;

  fx_product #(.SIG_W(24), .SIZE_W(SIZE_W), .RIGHT(37 + SCALE_EXP - FRAC)) coef_product (
      .clk(clk), .a_sign(scale_q[29]), .a_sig(scale_q[23:0]), .a_shift(scale_q[28:24]), .b(scale),
      .size(coef_size), .sign(coef_sign), .over(coef_over), .bad(coef_bad));

  // Up to four planes of a channel, each to the memory of its place in the row
  logic [P_W-1:0] made_plane, made_end;
  logic [ID_W-1:0] made_head;
  logic made_last, made_half;
  logic [2:0] made_count;
  logic [3:0] lift_over;
  logic [P_W-3:0] made_rows, made_rows_1;
  logic [4*COEF_W-1:0] coefs;
  logic row_made, coef_over_1;
  logic [WORD_W-1:0] row_word;

  assign {made_plane, made_head, made_last, made_half, made_count} = infos[(MAKE-1)*INFO_W +: INFO_W];
  assign made_end = made_plane + P_W'(made_count);
  assign row_word = {row, head};

  generate
    for (i = 0; i < 4; i = i + 1) begin : g_place
      logic [1:0] turn;
      logic [2:0] bits;  // places of the bit
      logic own, write;
      logic [P_W-3:0] line;
      logic [WORD_W-1:0] to;
      logic [SIZE_W+6:0] lifted;
      logic [SIZE_W-1:0] size;
      logic [COEF_W-1:0] value;
      logic [COEF_W-1:0] store [0:(1<<WORD_W)-1];
      assign turn = 2'(i) - made_plane[1:0];
      assign bits = {made_half, turn};
      assign own = making[MAKE-1] && {1'b0, turn} < made_count;
      assign line = made_plane[P_W-1:2] + (P_W-2)'(2'(i) < made_plane[1:0]);
      assign lifted = {7'b0, coef_size} << bits;
      assign lift_over[i] = own && lifted[SIZE_W+6:SIZE_W] != '0;
      assign size = lifted[SIZE_W+6:SIZE_W] != '0 ? '1 : lifted[SIZE_W-1:0];
      always_ff @(posedge clk) begin
        write <= own && 32'(line) < ROWS;
        to <= {ROW_W'(line), made_head};
        value <= coef_sign ? -{1'b0, size} : {1'b0, size};
        if (write) store[to] <= value;
        coefs[i*COEF_W +: COEF_W] <= store[row_word];
      end
    end
  endgenerate

  always_ff @(posedge clk) begin
    made_1 <= making[MAKE-1] && made_last;
    made_rows_1 <= made_end[P_W-1:2];
    if (made_1) made_rows <= made_rows_1;
    if (begins) made_rows <= '0;
    if (rst) {made_1, made_rows} <= '0;
  end

  // --- the sum of q x least value: what a token has whose codes are zero

  logic [C_W-1:0] least_channel;
  logic [ID_W-1:0] least_head, add_head;
  logic adding, add_go, added, add_first, add_last;
  logic [127:0] least_word;
  logic [15:0] least;
  logic [29:0] least_q;
  logic [MAKE-1:0] going;
  logic [MAKE*(ID_W+2)-1:0] terms;
  logic [SIZE_W-1:0] term_size;
  logic [COEF_W-1:0] term;
  logic term_sign, term_over, term_bad;
  logic [SUM_W-1:0] offset [0:Q_HEADS-1];

  assign add_go = adding && 5'(least_channel >> 3) < leasts_in;
  assign least_word = leasts[least_channel[CH_W-1:0] >> 3];
  assign {add_head, add_first, add_last} = terms[(MAKE-1)*(ID_W+2) +: ID_W+2];
  assign term = term_sign ? -{1'b0, term_size} : {1'b0, term_size};

  fx_product #(.SIG_W(24), .SIZE_W(SIZE_W), .RIGHT(37 + SCALE_EXP - FRAC)) least_product (
      .clk(clk), .a_sign(least_q[29]), .a_sig(least_q[23:0]), .a_shift(least_q[28:24]), .b(least),
      .size(term_size), .sign(term_sign), .over(term_over), .bad(term_bad));

  always_ff @(posedge clk) begin
    if (add_go) begin
      least_head <= least_head + 1'b1;
      if (least_head == ID_W'(Q_HEADS - 1)) begin
        least_head <= '0;
        least_channel <= least_channel + 1'b1;
        if (least_channel == C_W'(DIM - 1)) adding <= 1'b0;
      end
    end
    least <= least_word[16*least_channel[2:0] +: 16];
    least_q <= q_copy[{least_channel[CH_W-1:0], least_head}];
    going <= {going[MAKE-2:0], add_go};
    terms <= {terms[(MAKE-1)*(ID_W+2)-1:0], least_head, least_channel == '0,
        least_channel == C_W'(DIM - 1) && least_head == ID_W'(Q_HEADS - 1)};
    if (going[MAKE-1]) begin
      offset[add_head] <= (add_first ? '0 : offset[add_head]) + {{(SUM_W-COEF_W){term[COEF_W-1]}}, term};
      if (add_last) added <= 1'b1;
    end
    if (begins) begin
      least_channel <= '0;
      adding <= 1'b1;
      added <= 1'b0;
    end
    if (rst) begin
      adding <= 1'b0;
      least_head <= '0;
      going <= '0;
    end
  end

  // --- rows: a block and query a cycle, four gated coefficients for each of 32 tokens

  logic [4:0] valid;
  logic [5*(ADDR_W+2)-1:0] places;  // block, query, {of the first row, of the last row}
  logic [ADDR_W-1:0] read_addr, write_addr, out_addr;
  logic read_first, write_last, rows_in, page_done, out_busy;
  logic [127:0] data_0, data_1;
  logic [4*COEF_W-1:0] coefs_1;
  logic [1:0] cool;
  logic [32*SUM_W-1:0] outs;

  assign head_last = head == ID_W'(Q_HEADS - 1);
  assign row_made = (P_W-2)'(row) < made_rows && summing == '0;
  assign issue = s_page_tvalid && section == PLANES && needed && row_made && cool == '0 && !(row == row_end && out_busy);
  assign read_addr = places[2*(ADDR_W+2)+2 +: ADDR_W];
  assign read_first = places[2*(ADDR_W+2)+1];
  assign write_addr = places[4*(ADDR_W+2)+2 +: ADDR_W];
  assign write_last = places[4*(ADDR_W+2)];

  generate
    for (i = 0; i < 32; i = i + 1) begin : g_token
      localparam int AT = i < 16 ? 8 * i : 8 * (i - 16) + 4;
      logic [3:0] gates;
      logic [COEF_W:0] low, high;
      logic [SUM_W-1:0] row_sum, old, sum;
      logic [SUM_W-1:0] store [0:(1<<ADDR_W)-1];
      logic [SUM_W-1:0] out_store [0:(1<<ADDR_W)-1];
      assign gates = data_1[AT +: 4];
      assign outs[i*SUM_W +: SUM_W] = out_store[out_addr];
      always_ff @(posedge clk) begin
        low <= ({coefs_1[COEF_W-1], coefs_1[0 +: COEF_W]} & {(COEF_W+1){gates[0]}})
            + ({coefs_1[2*COEF_W-1], coefs_1[COEF_W +: COEF_W]} & {(COEF_W+1){gates[1]}});
        high <= ({coefs_1[3*COEF_W-1], coefs_1[2*COEF_W +: COEF_W]} & {(COEF_W+1){gates[2]}})
            + ({coefs_1[4*COEF_W-1], coefs_1[3*COEF_W +: COEF_W]} & {(COEF_W+1){gates[3]}});
        row_sum <= {{(SUM_W-COEF_W-1){low[COEF_W]}}, low} + {{(SUM_W-COEF_W-1){high[COEF_W]}}, high};
        old <= read_first ? '0 : store[read_addr];
        sum <= old + row_sum;
        if (valid[4]) store[write_addr] <= sum;
        if (valid[4] && write_last) out_store[write_addr] <= sum;
      end
    end
  endgenerate

  always_ff @(posedge clk) begin
    if (issue) head <= head_last ? '0 : head + 1'b1;
    if (cool != '0) cool <= cool - 1'b1;
    if (issue && head_last && block_last) cool <= 2'(GAP);
    valid <= {valid[3:0], issue};
    places <= {places[4*(ADDR_W+2)-1:0], block[2:0], head, row == '0, row == row_end};
    data_0 <= s_page_tdata;
    {data_1, coefs_1} <= {data_0, coefs};
    if (valid[4] && write_last && write_addr == {3'(BLOCKS - 1), ID_W'(Q_HEADS - 1)}) rows_in <= 1'b1;
    if (page_done) busy <= 1'b0;
    if (begins) begin
      busy <= 1'b1;
      rows_in <= 1'b0;
    end
    if (rst) begin
      {busy, rows_in} <= 2'b00;
      head <= '0;
      cool <= '0;
      valid <= '0;
    end
  end

  // --- what is met on the way, and scores out

  logic page_bad, page_over, out_bad, out_over, en;
  logic [8:0] tokens, out_tokens, out_token;
  logic [ID_W-1:0] out_head;
  logic reading, out_last, token_last;
  logic [4:0] out_valid, out_lasts;
  logic [5*ID_W-1:0] out_heads;
  logic [2:0] lane;
  logic [8*SUM_W-1:0] eight;
  logic [SUM_W-1:0] one, whole;
  logic [SUM_W-FRAC+19:0] score;
  logic [SUM_W-1:0] out_offset [0:Q_HEADS-1];
  logic beyond;

  assign page_done = busy && rows_in && added && generated;
  assign en = m_tready || !m_tvalid;
  assign out_addr = {out_token[7:5], out_head};
  assign token_last = out_token == out_tokens - 1'b1;
  assign out_last = token_last && out_head == ID_W'(Q_HEADS - 1);
  assign m_tvalid = out_valid[4];
  assign m_tlast = out_lasts[4];
  assign m_tid = out_heads[4*ID_W +: ID_W];
  assign beyond = score[SUM_W-FRAC+19:31] != {(SUM_W-FRAC-11){score[31]}};

  generate
    for (i = 0; i < 8; i = i + 1) begin : g_eight
      always_ff @(posedge clk) if (en) eight[i*SUM_W +: SUM_W] <= outs[(8*out_token[4:3]+i)*SUM_W +: SUM_W];
    end
    for (i = 0; i < Q_HEADS; i = i + 1) begin : g_offset
      always_ff @(posedge clk) if (page_done) out_offset[i] <= offset[i];
    end
  endgenerate

  always_ff @(posedge clk) begin
    if (told) tokens <= s_page_tuser;
    coef_over_1 <= making[MAKE-1] && (coef_over || lift_over != '0);
    if (coef_over_1 || (going[MAKE-1] && term_over)) page_over <= 1'b1;
    if ((making[MAKE-1] && coef_bad) || (going[MAKE-1] && term_bad) || (told && wide != '0)
        || 32'(planes) > 4 * ROWS) page_bad <= 1'b1;
    if (begins) begin
      page_over <= 1'b0;
      page_bad <= q_bad;
    end
    if (en) begin
      out_valid <= {out_valid[3:0], reading};
      out_lasts <= {out_lasts[3:0], out_last};
      out_heads <= {out_heads[4*ID_W-1:0], out_head};
      lane <= out_token[2:0];
      one <= eight[lane*SUM_W +: SUM_W];
      whole <= one + out_offset[out_heads[ID_W +: ID_W]];
      score <= (SUM_W-FRAC+20)'(($signed(whole) + $signed(SUM_W'(1 << (FRAC - 21)))) >>> (FRAC - 20));
      m_tdata <= beyond ? {score[SUM_W-FRAC+19], {31{!score[SUM_W-FRAC+19]}}} : score[31:0];
      m_tuser <= {beyond || out_over, out_bad};
      if (reading) begin
        out_token <= token_last ? '0 : out_token + 1'b1;
        if (token_last) out_head <= out_last ? '0 : out_head + 1'b1;
        if (out_last) reading <= 1'b0;
      end
    end
    if (m_tvalid && m_tready && m_tlast) out_busy <= 1'b0;
    if (page_done) begin
      {reading, out_busy} <= 2'b11;
      {out_bad, out_over, out_tokens} <= {page_bad, page_over, tokens};
    end
    if (rst) begin
      {reading, out_busy} <= 2'b00;
      out_token <= '0;
      out_head <= '0;
      out_valid <= '0;
    end
  end
endmodule
