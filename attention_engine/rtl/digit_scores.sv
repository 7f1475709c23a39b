`include "check.svh"

// Logits from score pages: the unit stores q of Q_HEADS queries and processes a stream of digit pages
// (`golden_progressive.py`).
//
// s_q: q of all queries for the first channel, then for the next channel, FP16, DIM x PARTS channels; s_q_tlast ends
// it. The unit accepts q only while no page is in progress; q applies to all later pages. s_page: full pages, 16 bytes
// per beat; s_page_tlast ends a page; s_page_tuser is its number of tokens, constant over its beats. A page has a scale
// for each of DIM channels, then minimums, both FP16, then a byte with 0 to 4 digits for each channel, padded to a
// line; then lines of 64 bytes: DIGITS / 16 lines for each 16 tokens. PARTS consecutive pages contain all channels of
// the same tokens. m: scores of all queries (m_tid) token by token, 32 bits with 20 fractional bits; m_tuser:
// {saturated, invalid digits or NaN or infinity in the input}; m_tlast ends the tokens. part: contribution of a page to
// a score: acc, top = e + 55, offset in units of 2^-20.
//
// A beat of a line with tokens takes Q_HEADS cycles, all other beats take one cycle. While the lines of a page, queued
// in a FIFO of FIFO beats, are processed, the unit converts the header of the next page to coefficients. Scores are
// output at one per cycle during the next lines.
module digit_scores #(
    parameter int DIM = 64,
    parameter int PARTS = 1,
    parameter int DIGITS = 64,
    parameter int Q_HEADS = 1,
    parameter int PAGE_BYTES = 4096,
    parameter int SCALE_MANT = 12101741,
    parameter int SCALE_EXP = 26,
    parameter int FIFO = 256,
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
    output logic            m_tlast,
    output logic            part_valid,
    output logic [ID_W-1:0] part_id,
    output logic [18:0]     part_acc,
    output logic [6:0]      part_top,
    output logic [59:0]     part_offset
);
  `include "fp16.svh"

  localparam int HEAD = (5 * DIM + 63) / 64 * 4;  // beats of a header
  localparam int LINES = DIGITS / 16;
  localparam int FIT = (PAGE_BYTES - 16 * HEAD) / (64 * LINES);
  localparam int BLOCKS = FIT > 16 ? 16 : FIT < 1 ? 1 : FIT;  // blocks of 16 tokens
  localparam int ACC_W = 19;
  localparam int SUM_W = 96;
  localparam int OFFSET_W = 60;
  localparam int MAX_TOP = 76;
  localparam int CH_W = $clog2(DIM);
  localparam int Q_W = $clog2(DIM * PARTS) + ID_W;  // {channel, query}
  localparam int PART_W = PARTS > 1 ? $clog2(PARTS) : 1;
  localparam int LINE_W = LINES > 1 ? $clog2(LINES) : 1;
  localparam int N_W = $clog2(4 * DIM + 5);
  localparam int LEFT_W = $clog2(BLOCKS * LINES * 4 + 1);
  localparam int FIFO_W = $clog2(FIFO);

  `CHECK(DIM % 16 == 0 && DIM >= 16 && DIM <= 128, "digit_scores: DIM must be a multiple of 16, at most 128")
  `CHECK(PARTS >= 1 && DIM * PARTS <= 128, "digit_scores: DIM x PARTS must be 128 at most")
  `CHECK(DIGITS % 16 == 0 && DIGITS >= 16 && DIGITS <= 4 * DIM, "digit_scores: DIGITS must be a multiple of 16, at most 4 x DIM")
  `CHECK(Q_HEADS >= 1 && Q_HEADS <= 8, "digit_scores: Q_HEADS must be 1 to 8")
  `CHECK(FIT >= 1 && PAGE_BYTES % 64 == 0, "digit_scores: PAGE_BYTES must be whole lines, and hold 16 tokens")
  `CHECK((1 << FIFO_W) == FIFO, "digit_scores: FIFO must be a power of two")

  genvar i, j;

  // --- input of q

  logic [15:0] q_scale [0:(1<<Q_W)-1];
  logic [15:0] q_least [0:(1<<Q_W)-1];  // q for the second product
  logic [Q_W-ID_W-1:0] q_channel;
  logic [ID_W-1:0] q_head;
  logic q_take, loaded, q_bad, busy;

  assign s_q_tready = !busy;
  assign q_take = s_q_tvalid && s_q_tready;

  always_ff @(posedge clk) begin
    if (q_take) begin
      q_scale[{q_channel, q_head}] <= s_q_tdata;
      q_least[{q_channel, q_head}] <= s_q_tdata;
      q_head <= q_head == ID_W'(Q_HEADS - 1) ? '0 : q_head + 1'b1;
      if (q_head == ID_W'(Q_HEADS - 1)) q_channel <= s_q_tlast ? '0 : q_channel + 1'b1;
      loaded <= s_q_tlast;
      q_bad <= (q_bad && (q_channel != '0 || q_head != '0)) || fp16_bad(s_q_tdata);
    end
    if (rst) begin
      loaded <= 1'b0;
      q_head <= '0;
      q_channel <= '0;
    end
  end

  // --- input of a page: the header is stored until all products have started, lines enter the queue

  logic [127:0] scales [0:DIM/8-1];
  logic [127:0] leasts [0:DIM/8-1];
  logic [127:0] widths [0:DIM/16-1];
  logic [5:0] beat_in;
  logic lines_in, head_full, take, needed, room;
  logic [LEFT_W-1:0] lines_left;
  logic [4:0] blocks_in;
  logic [8:0] tokens_in, tokens_made;

  assign blocks_in = 5'((s_page_tuser + 9'd15) >> 4);
  assign needed = lines_left != '0;
  assign s_page_tready = lines_in ? !needed || room : loaded && !head_full;
  assign take = s_page_tvalid && s_page_tready;

  always_ff @(posedge clk) begin
    if (take) begin
      if (!lines_in) begin
        beat_in <= beat_in + 1'b1;
        if (beat_in < 6'(DIM / 8)) scales[beat_in[CH_W-4:0]] <= s_page_tdata;
        else if (beat_in < 6'(DIM / 4)) leasts[(CH_W-3)'(beat_in - 6'(DIM / 8))] <= s_page_tdata;
        else if (beat_in < 6'(5 * DIM / 16)) widths[3'(beat_in - 6'(DIM / 4))] <= s_page_tdata;
        lines_left <= LEFT_W'(blocks_in * (4 * LINES));
        tokens_in <= s_page_tuser;
        if (beat_in == 6'(HEAD - 1)) {lines_in, head_full} <= 2'b11;
      end else if (needed) lines_left <= lines_left - 1'b1;
      if (s_page_tlast) begin
        beat_in <= '0;
        lines_in <= 1'b0;
      end
    end
    if (made_all) head_full <= 1'b0;
    if (rst) begin
      beat_in <= '0;
      {lines_in, head_full} <= 2'b00;
    end
  end

  logic [127:0] fifo [0:FIFO-1];
  logic [127:0] line_beat;
  logic [FIFO_W:0] put, got;
  logic beat_valid, beat_done, fetch;

  assign room = put - got != (FIFO_W+1)'(FIFO);
  assign fetch = put != got && (!beat_valid || beat_done);

  always_ff @(posedge clk) begin
    if (take && lines_in && needed) begin
      fifo[put[FIFO_W-1:0]] <= s_page_tdata;
      put <= put + 1'b1;
    end
    if (fetch) begin
      line_beat <= fifo[got[FIFO_W-1:0]];
      got <= got + 1'b1;
    end
    if (fetch || beat_done) beat_valid <= fetch;
    if (rst) begin
      {put, got} <= '0;
      beat_valid <= 1'b0;
    end
  end

  // --- exact products of a header: q x scale, to find the leading ones, and the sum of q x minimum

  localparam int MAKE = 7;
  localparam int PRODUCT_W = 22 + 7 + 3 + 1;
  localparam int INFO_W = CH_W + ID_W;
  logic makes, making, made_all, made_wait, hand_over, channel_last, head_end;
  logic [CH_W-1:0] channel;
  logic [ID_W-1:0] head;
  logic [PART_W-1:0] part;
  logic [Q_W-ID_W-1:0] q_at;
  logic [MAKE-1:0] go;
  logic [MAKE*INFO_W-1:0] infos;
  logic [127:0] scale_word, least_word, width_word;
  logic [7:0] width_byte;
  logic [15:0] scale_1, least_1, least_2, q_1, q_copy_1, q_copy_2;
  logic [7:0] width_1;
  logic first_1, wide_1;
  logic [3*(MAKE-1)-1:0] width_on;  // from the second cycle onward
  logic [10:0] sig_a, sig_b;
  logic [4:0] shift_a, shift_b;
  logic [5:0] shift_3;
  logic [21:0] raw, normal, normal_1;
  logic [4:0] zeros;
  logic [3*6-1:0] shifts;
  logic [MAKE-2:0] signs;
  logic [6:0] place;
  logic [PRODUCT_W-1:0] products [0:(4<<(CH_W+ID_W-1))-1];  // {half, channel, query}
  logic half_in, half_out;
  logic [6:0] tops [0:Q_HEADS-1];
  logic [OFFSET_W-1:0] offsets [0:Q_HEADS-1];
  logic [N_W-1:0] digits;
  logic making_bad;
  logic higher;
  logic [51:0] term_size;
  logic term_sign, term_bad, unused_over;
  logic [ID_W-1:0] place_head;
  logic [CH_W-1:0] place_channel;
  logic [2:0] place_width;
  logic [6:0] place_lift;

  assign channel_last = channel == CH_W'(DIM - 1);
  assign head_end = head == ID_W'(Q_HEADS - 1);
  assign makes = head_full && !making && go == '0 && !made_wait;
  assign made_all = making && channel_last && head_end;
  assign q_at = (Q_W-ID_W)'(part * DIM) + (Q_W-ID_W)'(channel);
  assign scale_word = scales[channel >> 3];
  assign least_word = leasts[channel >> 3];
  assign width_word = widths[channel >> 4];
  assign width_byte = width_word[8*channel[3:0] +: 8];
  assign wide_1 = width_1 > 8'd4;

  always_ff @(posedge clk) begin
    go <= {go[MAKE-2:0], making};
    infos <= {infos[(MAKE-1)*INFO_W-1:0], channel, head};
    if (making) begin
      head <= head_end ? '0 : head + 1'b1;
      if (head_end) channel <= channel + 1'b1;
      if (made_all) begin
        making <= 1'b0;
        tokens_made <= tokens_in;  // the next header can enter
        channel <= '0;
      end
    end else if (makes) making <= 1'b1;
    scale_1 <= scale_word[16*channel[2:0] +: 16];
    least_1 <= least_word[16*channel[2:0] +: 16];
    q_1 <= q_scale[{q_at, head}];
    q_copy_1 <= q_least[{q_at, head}];
    width_1 <= width_byte;
    {q_copy_2, least_2} <= {q_copy_1, least_1};  // memory latency
    first_1 <= head == '0;
    if (go[MAKE-1] && !go[MAKE-2]) made_wait <= 1'b1;
    if (hand_over) begin
      made_wait <= 1'b0;
      half_in <= !half_in;
      part <= part == PART_W'(PARTS - 1) ? '0 : part + 1'b1;
    end
    if (rst) begin
      {making, made_wait, half_in} <= 3'b000;
      go <= '0;
      channel <= '0;
      head <= '0;
      part <= '0;
    end
  end

  // The sum of the first product is delayed to seven cycles, like the second product
  fx_product #(.SIG_W(11), .SIZE_W(52), .RIGHT(28)) least_product (
      .clk(clk), .a_sign(q_copy_2[15]), .a_sig(fp16_sig(q_copy_2)), .a_shift(fp16_shift(q_copy_2)), .b(least_2),
      .size(term_size), .sign(term_sign), .over(unused_over), .bad(term_bad));

  generate
    for (i = 0; i < Q_HEADS; i = i + 1) begin : g_made
      always_ff @(posedge clk) begin
        if (go[MAKE-1] && place_head == ID_W'(i)) begin
          offsets[i] <= offsets[i] + (term_sign ? -{8'b0, term_size} : {8'b0, term_size});
          if (higher) tops[i] <= place_lift;
        end
        if (makes) begin
          offsets[i] <= '0;
          tops[i] <= '0;
        end
      end
    end
  endgenerate

  // Leading one of the second product, and its position above 2^-49
  normalize #(.W(22)) norm (.clk(clk), .en(1'b1), .value(raw), .normal(normal), .zeros(zeros));

  assign place_width = width_on[3*(MAKE-2) +: 3];
  assign {place_channel, place_head} = infos[(MAKE-1)*INFO_W +: INFO_W];
  assign place_lift = place + 7'({place_width - 3'd1, 1'b0});
  assign higher = normal_1[21] && place_width != '0 && place_lift > tops[place_head];

  always_ff @(posedge clk) begin
    sig_a <= fp16_sig(q_1);
    sig_b <= fp16_sig(scale_1);
    shift_a <= fp16_shift(q_1);
    shift_b <= fp16_shift(scale_1);
    raw <= sig_a * sig_b;
    shift_3 <= {1'b0, shift_a} + {1'b0, shift_b};
    shifts <= {shifts[11:0], shift_3};
    signs <= {signs[MAKE-3:0], q_1[15] ^ scale_1[15]};
    width_on <= {width_on[3*(MAKE-2)-1:0], wide_1 ? 3'd4 : width_1[2:0]};
    normal_1 <= normal;
    place <= 7'd22 + {1'b0, shifts[17:12]} - {2'b0, zeros};
    if (go[MAKE-1]) begin
      products[{half_in, place_channel, place_head}] <= {signs[MAKE-2], normal_1, place, place_width};
    end
    if (go[0] && first_1) digits <= digits + N_W'(wide_1 ? 3'd4 : width_1[2:0]);
    if (go[0] && (wide_1 || (width_1 != '0 && fp16_bad(scale_1)))) making_bad <= 1'b1;
    if (go[MAKE-1] && term_bad) making_bad <= 1'b1;
    if (32'(digits) > DIGITS) making_bad <= 1'b1;
    if (makes) begin
      digits <= '0;
      making_bad <= q_bad;
    end
  end

  // --- coefficients of all digits of a channel at once; channels without digits follow the last digit

  logic [1:0] slots;  // pages with coefficients: in preparation, in progress, in output
  logic coding, blank, coded, slot_in;
  logic [CH_W:0] code_channel;
  logic [ID_W-1:0] code_head;
  logic [CH_W:0] blanks;
  logic [4:0] code_go;
  logic [5*(ID_W+1)-1:0] code_infos;  // {blank, query}
  logic [PRODUCT_W-1:0] product_1;
  logic sign_2, zero_2, sign_3;
  logic [21:0] sig_2;
  logic [2:0] width_c2, width_c3, width_c4;
  logic [6:0] down_2;
  logic [N_W-1:0] number_2, number_3, number_4;
  logic [4*8-1:0] codes;  // codes of all levels
  logic [6:0] slot_top [0:2*Q_HEADS-1];  // {slot, query}
  logic [OFFSET_W-1:0] slot_offset [0:2*Q_HEADS-1];
  logic [1:0] slot_bad, ready;
  logic [8:0] slot_tokens [0:1];
  logic code_last;

  assign hand_over = made_wait && !coding && code_go == '0 && !coded && slots != 2'd2;
  assign code_last = blank ? blanks == 1 : code_channel == (CH_W+1)'(DIM - 1);

  generate
    for (i = 0; i < 2; i = i + 1) begin : g_slot
      for (j = 0; j < Q_HEADS; j = j + 1) begin : g_query
        always_ff @(posedge clk) begin
          if (hand_over && slot_in == 1'(i)) begin
            slot_top[i*Q_HEADS+j] <= tops[j];
            slot_offset[i*Q_HEADS+j] <= offsets[j];
          end
        end
      end
    end
  endgenerate

  always_ff @(posedge clk) begin
    if (hand_over) begin
      coding <= 1'b1;
      blank <= 1'b0;
      code_channel <= '0;
      half_out <= half_in;
      number_2 <= '0;
      blanks <= 32'(digits) >= DIGITS ? '0 : (CH_W+1)'((N_W'(DIGITS + 3) - digits) >> 2);
      slot_bad[slot_in] <= making_bad;
      slot_tokens[slot_in] <= tokens_made;
    end
    code_go <= {code_go[3:0], coding};
    code_infos <= {code_infos[4*(ID_W+1)-1:0], blank, code_head};
    if (coding) begin
      code_head <= code_head == ID_W'(Q_HEADS - 1) ? '0 : code_head + 1'b1;
      if (code_head == ID_W'(Q_HEADS - 1)) begin
        if (blank) blanks <= blanks - 1'b1;
        else code_channel <= code_channel + 1'b1;
        if (code_last) begin
          blank <= 1'b1;
          if (blank || blanks == '0) coding <= 1'b0;
        end
      end
    end
    product_1 <= products[{half_out, code_channel[CH_W-1:0], code_head}];
    {sign_2, sig_2} <= product_1[PRODUCT_W-1 -: 23];
    zero_2 <= code_infos[ID_W] || !product_1[31];
    down_2 <= slot_top[32'(slot_in) * Q_HEADS + 32'(code_infos[0 +: ID_W])] - product_1[9:3];
    width_c2 <= code_infos[ID_W] ? 3'd4 : product_1[2:0];
    if (code_go[1] && code_infos[(ID_W+1) +: ID_W] == ID_W'(Q_HEADS - 1)) number_2 <= number_2 + N_W'(width_c2);
    {width_c3, width_c4} <= {width_c2, width_c3};
    {number_3, number_4} <= {number_2, number_3};
    sign_3 <= sign_2;
    coded <= code_go[4] && !code_go[3];
    if (coded) begin
      slot_in <= !slot_in;
      ready[slot_in] <= 1'b1;
    end
    if (page_ends) ready[slot_work] <= 1'b0;
    slots <= slots + {1'b0, hand_over} - {1'b0, page_out};
    if (rst) begin
      {coding, coded, slot_in} <= 3'b000;
      ready <= '0;
      slots <= '0;
      code_go <= '0;
      code_head <= '0;
    end
  end

  // Level l is shifted by 2 l bits; the largest level is scaled to 64..127
  generate
    for (i = 0; i < 4; i = i + 1) begin : g_level
      logic [6:0] down;
      logic gone;
      logic [29:0] moved;  // 7 bits of a coefficient, half a unit, and lower bits
      logic [7:0] rounded;
      logic [6:0] size;
      assign down = down_2 - 7'(2 * i);
      assign rounded = {1'b0, moved[29:23]} + {7'b0, moved[22] && (moved[21:0] != '0 || moved[23])};
      assign size = rounded[7] ? 7'd127 : rounded[6:0];
      always_ff @(posedge clk) begin
        moved <= zero_2 || down > 7'd7 ? '0 : {sig_2, 8'b0} >> down[2:0];
        codes[8*i +: 8] <= sign_3 ? -{1'b0, size} : {1'b0, size};
      end
    end
  endgenerate

  // Writes the coefficient of each digit to the memory of its position in a line
  localparam int COEF_A = 1 + LINE_W + ID_W;  // {slot, line, query}
  logic [127:0] coefs, coefs_1;
  logic [ID_W-1:0] head_4;
  logic [COEF_A-1:0] coef_at;

  assign head_4 = code_infos[3*(ID_W+1) +: ID_W];

  generate
    for (i = 0; i < 16; i = i + 1) begin : g_place
      logic [3:0] turn;
      logic own, write;
      logic [N_W-4:0] line_4;
      logic [COEF_A-1:0] to;
      logic [7:0] value;
      logic [7:0] store [0:(1<<COEF_A)-1];
      assign turn = 4'(i) - number_4[3:0];
      assign line_4 = (N_W-3)'(number_4[N_W-1:4]) + (N_W-3)'(4'(i) < number_4[3:0]);
      assign own = code_go[3] && turn < {1'b0, width_c4} && 32'(line_4) < LINES;
      always_ff @(posedge clk) begin
        write <= own;
        to <= {slot_in, LINE_W'(line_4), head_4};
        value <= codes[8*turn[1:0] +: 8];
        if (write) store[to] <= value;
      end
      assign coefs[8*i +: 8] = store[coef_at];
    end
  endgenerate

  // --- lines in progress: four tokens per beat and query; sums of the last line enter one of two output halves

  localparam int WORK = 4;
  localparam int WORK_W = 2 + ID_W + 3;  // position, query, first line, last line, half
  logic slot_work, issue, work_head_last, line_first, line_last, begins_last, page_ends, block_half;
  logic [1:0] quarter;
  logic [LINE_W-1:0] line;
  logic [4:0] block, block_end;
  logic [ID_W-1:0] work_head;
  logic [1:0] halves;  // halves in input or output
  logic half_given;
  logic [127:0] beat_1;
  logic [WORK-1:0] work;
  logic [WORK*WORK_W-1:0] work_infos;
  logic [4*14-1:0] dots;
  logic [4*ACC_W-1:0] acc, acc_next;
  logic [4*ACC_W-1:0] accs [0:(4<<ID_W)-1];
  logic [4*ACC_W-1:0] outs [0:(8<<ID_W)-1];
  logic [1:0] acc_quarter;
  logic [ID_W-1:0] acc_head;
  logic acc_first, acc_last, acc_half, half_filled;
  logic [1:0] filled;

  assign line_first = line == '0;
  assign line_last = line == LINE_W'(LINES - 1);
  assign work_head_last = work_head == ID_W'(Q_HEADS - 1);
  assign begins_last = line_last && quarter == '0 && work_head == '0;
  assign issue = beat_valid && ready[slot_work] && !(begins_last && halves == 2'd2);
  assign beat_done = issue && work_head_last;
  assign block_end = 5'((slot_tokens[slot_work] - 9'd1) >> 4);
  assign page_ends = beat_done && quarter == 2'd3 && line_last && block == block_end;
  assign coef_at = {slot_work, line, work_head};
  assign {acc_quarter, acc_head, acc_first, acc_last, acc_half} = work_infos[(WORK-1)*WORK_W +: WORK_W];
  assign acc = accs[{acc_quarter, acc_head}];

  digit_dots #(.COEF_W(8)) dotting (.clk(clk), .digits(beat_1), .coefs(coefs_1), .sums(dots));

  generate
    for (i = 0; i < 4; i = i + 1) begin : g_acc
      assign acc_next[ACC_W*i +: ACC_W] = (acc_first ? '0 : acc[ACC_W*i +: ACC_W]) + ACC_W'($signed(dots[14*i +: 14]));
    end
  endgenerate

  always_ff @(posedge clk) begin
    if (issue) begin
      work_head <= work_head_last ? '0 : work_head + 1'b1;
      if (work_head_last) begin
        quarter <= quarter + 1'b1;
        if (quarter == 2'd3) begin
          line <= line_last ? '0 : line + 1'b1;
          if (line_last) begin
            block <= page_ends ? '0 : block + 1'b1;
            block_half <= !block_half;
          end
        end
      end
      if (page_ends) slot_work <= !slot_work;
    end
    halves <= halves + {1'b0, issue && begins_last} - {1'b0, half_given};
    beat_1 <= line_beat;
    coefs_1 <= coefs;
    work <= {work[WORK-2:0], issue};
    work_infos <= {work_infos[(WORK-1)*WORK_W-1:0], quarter, work_head, line_first, line_last, block_half};
    if (work[WORK-1]) begin
      accs[{acc_quarter, acc_head}] <= acc_next;
      if (acc_last) outs[{acc_half, acc_quarter, acc_head}] <= acc_next;
    end
    half_filled <= work[WORK-1] && acc_last && acc_quarter == 2'd3 && acc_head == ID_W'(Q_HEADS - 1);
    filled <= filled + {1'b0, half_filled} - {1'b0, half_given};
    if (rst) begin
      {slot_work, block_half, half_filled} <= 3'b000;
      {work, halves, filled} <= '0;
      work_head <= '0;
      quarter <= '0;
      line <= '0;
      block <= '0;
    end
  end

  // --- score output: acc x 2^e + offset, exact; pages of the same tokens are summed

  localparam int OUT = 5;
  localparam int OUT_W = ID_W + 3;  // query, last, saturated, bad
  localparam int KEEP_W = $clog2(16 * BLOCKS) + ID_W;
  logic en, out_go, token_last, out_head_last, slot_out, out_half, page_out, out_part_last, out_part_first, clear;
  logic [8:0] out_token, out_tokens;
  logic [ID_W-1:0] out_head;
  logic [PART_W-1:0] out_part;
  logic [4*ACC_W-1:0] word_1;
  logic [1:0] lane_1;
  logic [6:0] top_now, top_1, top_2, top_3, lift, lift_2;
  logic [OFFSET_W-1:0] offset_1, offset_2, offset_3, offset_4;
  logic [ACC_W-1:0] acc_2, acc_3;
  logic [ACC_W+6:0] fine_3;
  logic [3:0] coarse_3;
  logic [SUM_W-1:0] moved_4, sum_5, total;
  logic [OUT-1:0] out_valid;
  logic [OUT*OUT_W-1:0] out_infos;
  logic over_now, bad_now, bad_before;
  logic [Q_HEADS-1:0] over_before;
  logic scale_valid;

  assign out_tokens = slot_tokens[slot_out];
  assign token_last = out_token == out_tokens - 1'b1;
  assign out_head_last = out_head == ID_W'(Q_HEADS - 1);
  assign out_part_first = out_part == '0;
  assign out_part_last = out_part == PART_W'(PARTS - 1);
  assign out_go = en && filled != '0 && clear;
  assign half_given = out_go && out_head_last && (out_token[3:0] == 4'd15 || token_last);
  assign page_out = out_go && out_head_last && token_last;
  assign top_now = slot_top[32'(slot_out) * Q_HEADS + 32'(out_head)];
  assign over_now = top_now > 7'(MAX_TOP) || (over_before[out_head] && !out_part_first);
  assign bad_now = slot_bad[slot_out] || (bad_before && !out_part_first);
  assign lift = top_1 > 7'(MAX_TOP) ? 7'(MAX_TOP) : top_1;

  always_ff @(posedge clk) begin
    if (en) begin
      out_valid <= {out_valid[OUT-2:0], out_go};
      out_infos <= {out_infos[(OUT-1)*OUT_W-1:0], out_head, token_last && out_head_last, over_now, bad_now};
      word_1 <= outs[{out_half, out_token[3:2], out_head}];
      lane_1 <= out_token[1:0];
      top_1 <= top_now;
      offset_1 <= slot_offset[32'(slot_out) * Q_HEADS + 32'(out_head)];
      acc_2 <= word_1[ACC_W*lane_1 +: ACC_W];
      lift_2 <= lift;
      {top_2, top_3} <= {top_1, top_2};
      {offset_2, offset_3, offset_4} <= {offset_1, offset_2, offset_3};
      fine_3 <= (ACC_W+7)'($signed(acc_2)) << lift_2[2:0];
      acc_3 <= acc_2;
      coarse_3 <= lift_2[6:3];
      moved_4 <= SUM_W'($signed(fine_3)) << {coarse_3, 3'b0};
      sum_5 <= moved_4 + {offset_4[OFFSET_W-1], offset_4, 35'b0};
    end
    if (out_go) begin
      out_head <= out_head_last ? '0 : out_head + 1'b1;
      over_before[out_head] <= over_now;
      if (out_head_last) out_token <= token_last ? '0 : out_token + 1'b1;
      if (page_out) begin
        bad_before <= bad_now;
        slot_out <= !slot_out;
        out_part <= out_part_last ? '0 : out_part + 1'b1;
      end
    end
    if (half_given) out_half <= !out_half;
    if (rst) begin
      out_valid <= '0;
      {slot_out, out_half} <= 2'b00;
      out_token <= '0;
      out_head <= '0;
      out_part <= '0;
    end
  end

  assign part_valid = en && out_valid[2];
  assign part_id = out_infos[2*OUT_W+3 +: ID_W];
  assign part_acc = acc_3;
  assign part_top = top_3;
  assign part_offset = offset_3;

  generate
    if (PARTS == 1) begin : g_whole
      assign clear = 1'b1;
      assign total = sum_5;
      assign scale_valid = out_valid[OUT-1];
    end else begin : g_parts
      // The first token of a page waits until the previous page is stored
      logic [SUM_W-1:0] kept [0:(1<<KEEP_W)-1];
      logic [SUM_W-1:0] kept_5;
      logic [OUT*(KEEP_W+2)-1:0] ats;  // {first part, last part, token, query}
      logic [KEEP_W-1:0] at_4, at_5;
      logic first_5, last_5;
      assign clear = out_token != '0 || out_head != '0 || out_valid == '0;
      assign at_4 = ats[3*(KEEP_W+2) +: KEEP_W];
      assign {first_5, last_5, at_5} = ats[4*(KEEP_W+2) +: KEEP_W+2];
      assign total = sum_5 + (first_5 ? '0 : kept_5);
      assign scale_valid = out_valid[OUT-1] && last_5;
      always_ff @(posedge clk) begin
        if (en) begin
          ats <= {ats[(OUT-1)*(KEEP_W+2)-1:0], out_part_first, out_part_last, (KEEP_W-ID_W)'(out_token), out_head};
          kept_5 <= kept[at_4];
          if (out_valid[OUT-1] && !last_5) kept[at_5] <= total;
        end
      end
    end
  endgenerate

  logic [ID_W+2:0] scale_user, score_user;
  logic score_over;

  assign scale_user = out_infos[(OUT-1)*OUT_W +: OUT_W];
  assign m_tid = score_user[3 +: ID_W];
  assign m_tlast = score_user[2];
  assign m_tuser = {score_user[1] || score_over, score_user[0]};
  assign busy = beat_in != '0 || lines_in || head_full || made_wait || go != '0 || slots != '0 || part != '0;

  fx_scale #(.ACC_W(SUM_W), .OUT_W(32), .OUT_FRAC(20), .USER_W(OUT_W)) scaling (
      .clk(clk), .rst(rst), .s_tvalid(scale_valid), .s_tready(en), .s_tdata(total), .s_mant(24'(SCALE_MANT)),
      .s_exp(7'(SCALE_EXP + 7)), .s_tuser(scale_user), .m_tvalid(m_tvalid), .m_tready(m_tready), .m_tdata(m_tdata),
      .m_over(score_over), .m_tuser(score_user));
endmodule
