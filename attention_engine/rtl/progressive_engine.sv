`include "check.svh"

// Attention over progressive-precision pages for one head: Q_HEADS queries share keys and values (`golden_engine.py`).
//
// s_query: FP16 values of all queries for each of d = DIM x PARTS channels; s_query_tlast ends it. m_req requests a
// page, {kind, index, part}: kind 0 is a score page, 1 a refined page, 2 a value page. s_page supplies the pages in
// that order, 16 bytes per beat; s_page_tlast ends a page. m_out: the output, query by query, FP16. Phases: q; scores
// of all tokens from score pages, and their softmax; page selection; chosen refined pages; value pages; output.
//
// AXI-Lite, 32-bit registers: 0x00 control (bit 0: start), 0x04 status (0 busy, 1 done, 2 invalid parameters, 8 NaN or
// infinity in the input, 9 saturation; start clears them), 0x08 S, 0x0C gain threshold, 0x10 mass threshold, 0x14
// {tokens of a value page, of a refined page}, 0x20 cycles of the last run, 0x24 {Q_HEADS, d}, 0x28 chosen refined
// pages, 0x2C value pages read. 0x40 + 16 x query: m and l (two words, 32 fractional bits).
module progressive_engine #(
    parameter int DIM = 64,
    parameter int PARTS = 1,
    parameter int DIGITS = 64,
    parameter int V_BITS = 2,
    parameter int Q_HEADS = 1,
    parameter int N_MAX = 2048,
    parameter int PAGE_BYTES = 4096,
    parameter int SCORE_TOKENS = 224,
    parameter int REFINED = 31,
    parameter int VALUES = 224,
    parameter int HEAD = 28,
    parameter int SCALE_MANT = 12102203,
    parameter int SCALE_EXP = 26,
    parameter int ROT_MANT = 8388608,
    parameter int ROT_EXP = 26
) (
    input  logic         clk,
    input  logic         rst,
    input  logic         s_axil_awvalid,
    output logic         s_axil_awready,
    input  logic [7:0]   s_axil_awaddr,
    input  logic         s_axil_wvalid,
    output logic         s_axil_wready,
    input  logic [31:0]  s_axil_wdata,
    output logic         s_axil_bvalid,
    input  logic         s_axil_bready,
    output logic [1:0]   s_axil_bresp,
    input  logic         s_axil_arvalid,
    output logic         s_axil_arready,
    input  logic [7:0]   s_axil_araddr,
    output logic         s_axil_rvalid,
    input  logic         s_axil_rready,
    output logic [31:0]  s_axil_rdata,
    output logic [1:0]   s_axil_rresp,
    input  logic         s_query_tvalid,
    output logic         s_query_tready,
    input  logic [15:0]  s_query_tdata,
    input  logic         s_query_tlast,
    output logic         m_req_tvalid,
    input  logic         m_req_tready,
    output logic [33:0]  m_req_tdata,
    input  logic         s_page_tvalid,
    output logic         s_page_tready,
    input  logic [127:0] s_page_tdata,
    input  logic         s_page_tlast,
    output logic         m_out_tvalid,
    input  logic         m_out_tready,
    output logic [15:0]  m_out_tdata,
    output logic         m_out_tlast
);
  localparam logic [2:0] IDLE = 3'd0, QUERY = 3'd1, SCORE = 3'd2, CHOOSE = 3'd3, REFINE = 3'd4, SUM = 3'd5, OUT = 3'd6;
  localparam int D = DIM * PARTS;
  localparam int LANES = 8;
  localparam int ACC_W = 88;
  localparam int SIG_W = 17;
  localparam int TOTAL_W = 56;
  localparam int ID_W = Q_HEADS > 1 ? $clog2(Q_HEADS) : 1;
  localparam int N_W = $clog2(N_MAX + 1);
  localparam int X_W = $clog2(N_MAX * Q_HEADS + 1);
  localparam int PART_W = PARTS > 1 ? $clog2(PARTS) : 1;
  localparam int BLOCK = 32 / V_BITS;
  localparam int ROTATION = DIM & -DIM;
  localparam int OUT_N = Q_HEADS * D;
  localparam int OUT_A = $clog2(OUT_N + 1);
  localparam int PAGES_R = (N_MAX + REFINED - 1) / REFINED;
  localparam int PAGES_V = (N_MAX + VALUES - 1) / VALUES;
  localparam int R_W = $clog2(PAGES_R + 1);
  localparam int V_W = $clog2(PAGES_V + 1);
  localparam int POS_W = D > LANES ? $clog2(D / LANES) : 1;
  localparam logic [POS_W:0] DRAIN = (POS_W+1)'(D / LANES - 1);
  localparam logic [63:0] SIGNS = 64'h9E3779B97F4A7C15;  // channels with inverted sign in the rotation
  localparam int WAIT_W = $clog2(REFINED * Q_HEADS + 1);

  `CHECK(D <= 128, "progressive_engine: DIM x PARTS must be 128 at most")
  `CHECK(N_MAX >= 16 && N_MAX <= 32768, "progressive_engine: N_MAX must be 16 to 32768")
  `CHECK(Q_HEADS >= 1 && Q_HEADS <= 8, "progressive_engine: Q_HEADS must be 1 to 8")

  genvar i;

  logic [2:0] phase;
  logic phase_begins, next, bad, over;
  logic [N_W-1:0] seq_len;
  logic [31:0] gain_threshold, mass_threshold;
  logic [R_W-1:0] chosen;  // refined pages
  logic [V_W-1:0] reads;   // value pages
  logic [12:0] top [0:Q_HEADS-1];
  logic [TOTAL_W-1:0] rest [0:Q_HEADS-1];  // l: of tokens that are not chosen, then of chosen tokens

  // --- registers

  logic [31:0] reg_s, reg_gain, reg_mass, cycles;
  logic done, refused, saw_bad, saw_over, write, start, legal;
  logic [8*128-1:0] row_words;
  logic [3:0] read_row;

  assign s_axil_awready = !s_axil_bvalid && s_axil_awvalid && s_axil_wvalid;
  assign s_axil_wready = s_axil_awready;
  assign write = s_axil_awready;
  assign s_axil_arready = !s_axil_rvalid;
  assign s_axil_bresp = 2'b00;
  assign s_axil_rresp = 2'b00;
  assign start = write && s_axil_awaddr[7:2] == 6'd0 && s_axil_wdata[0] && phase == IDLE;
  assign legal = reg_s >= 1 && reg_s <= N_MAX;
  assign read_row = s_axil_araddr[7:4] - 4'd4;

  generate
    for (i = 0; i < 8; i = i + 1) begin : g_row
      if (i < Q_HEADS) begin : g_held
        assign row_words[128*i +: 128] = {40'b0, rest[i], {19{top[i][12]}}, top[i]};
      end else begin : g_none
        assign row_words[128*i +: 128] = '0;
      end
    end
  endgenerate

  always_ff @(posedge clk) begin
    if (write) begin
      s_axil_bvalid <= 1'b1;
      case (s_axil_awaddr[7:2])
        6'd2: reg_s <= s_axil_wdata;
        6'd3: reg_gain <= s_axil_wdata;
        6'd4: reg_mass <= s_axil_wdata;
        default: ;
      endcase
    end else if (s_axil_bready) s_axil_bvalid <= 1'b0;
    if (s_axil_arvalid && s_axil_arready) begin
      s_axil_rvalid <= 1'b1;
      case (s_axil_araddr[7:2])
        6'd1: s_axil_rdata <= {22'b0, saw_over, saw_bad, 5'b0, refused, done, phase != IDLE};
        6'd2: s_axil_rdata <= reg_s;
        6'd3: s_axil_rdata <= reg_gain;
        6'd4: s_axil_rdata <= reg_mass;
        6'd5: s_axil_rdata <= {16'(VALUES), 16'(REFINED)};
        6'd8: s_axil_rdata <= cycles;
        6'd9: s_axil_rdata <= {16'(Q_HEADS), 16'(D)};
        6'd10: s_axil_rdata <= 32'(chosen);
        6'd11: s_axil_rdata <= 32'(reads);
        default: s_axil_rdata <= read_row < 4'(Q_HEADS) ? row_words[32*{read_row[2:0], s_axil_araddr[3:2]} +: 32] : '0;
      endcase
    end else if (s_axil_rready) s_axil_rvalid <= 1'b0;
    if (rst) begin
      s_axil_bvalid <= 1'b0;
      s_axil_rvalid <= 1'b0;
      {reg_s, reg_gain, reg_mass} <= '0;
    end
  end

  always_ff @(posedge clk) begin
    phase_begins <= 1'b0;
    if (start) begin
      done <= 1'b0;
      refused <= !legal;
      if (legal) begin
        phase <= QUERY;
        phase_begins <= 1'b1;
        {saw_bad, saw_over} <= 2'b00;
        cycles <= '0;
        seq_len <= reg_s[N_W-1:0];
        gain_threshold <= reg_gain;
        mass_threshold <= reg_mass;
      end
    end else if (next && !phase_begins) begin
      phase <= phase == OUT ? IDLE : phase + 1'b1;
      phase_begins <= phase != OUT;
      if (phase == OUT) done <= 1'b1;
    end
    if (phase != IDLE) begin
      cycles <= cycles + 1'b1;
      if (bad) saw_bad <= 1'b1;
      if (over) saw_over <= 1'b1;
    end
    if (rst) begin
      phase <= IDLE;
      {phase_begins, done, refused, saw_bad, saw_over} <= '0;
      cycles <= '0;
    end
  end

  // --- pages: a walk over the wanted pages, with two outstanding requests

  logic refined_map [0:PAGES_R-1];
  logic value_map [0:PAGES_V-1];
  logic walking, wanted, walk_last, part_last, put, asks, page_take, page_done;
  logic [15:0] walk_at;
  logic [PART_W-1:0] walk_part;
  logic [N_W-1:0] walk_first, walk_left;
  logic [8:0] walk_size, walk_count;
  logic [1:0] put_at, ask_at, page_at;
  logic [15:0] pages_in;
  logic [15:0] queue_index [0:1];
  logic [PART_W-1:0] queue_part [0:1];
  logic [N_W-1:0] queue_first [0:1];
  logic [8:0] queue_count [0:1];
  logic [15:0] pages_due;
  logic [8:0] count;
  logic [PART_W-1:0] part;

  assign walk_size = phase == SCORE ? 9'(SCORE_TOKENS) : phase == REFINE ? 9'(REFINED) : 9'(VALUES);
  assign wanted = phase == REFINE ? refined_map[R_W'(walk_at)] : phase == SUM ? value_map[V_W'(walk_at)] : 1'b1;
  assign part_last = phase == REFINE || walk_part == PART_W'(PARTS - 1);
  assign walk_last = 32'(walk_left) <= 32'(walk_size);
  assign walk_count = walk_last ? 9'(walk_left) : walk_size;
  assign put = walking && wanted && put_at - page_at != 2'd2;
  assign asks = m_req_tvalid && m_req_tready;
  assign m_req_tvalid = ask_at != put_at;
  assign m_req_tdata = {phase == SCORE ? 2'd0 : phase == REFINE ? 2'd1 : 2'd2, queue_index[ask_at[0]],
      16'(queue_part[ask_at[0]])};
  assign page_take = s_page_tvalid && s_page_tready && s_page_tlast;
  assign count = queue_count[page_at[0]];
  assign part = queue_part[page_at[0]];

  always_ff @(posedge clk) begin
    if (phase_begins) begin
      walking <= phase == SCORE || phase == REFINE || phase == SUM;
      walk_at <= '0;
      walk_part <= '0;
      walk_first <= '0;
      walk_left <= seq_len;
      pages_in <= '0;
    end else begin
      if (walking && (put || !wanted)) begin
        walk_part <= part_last || !wanted ? '0 : walk_part + 1'b1;
        if (part_last || !wanted) begin
          walk_at <= walk_at + 1'b1;
          walk_first <= walk_first + N_W'(walk_size);
          walk_left <= walk_left - N_W'(walk_size);
          if (walk_last) walking <= 1'b0;
        end
      end
      if (page_take) pages_in <= pages_in + 1'b1;
    end
    if (put) begin
      queue_index[put_at[0]] <= walk_at;
      queue_part[put_at[0]] <= phase == REFINE ? '0 : walk_part;
      queue_first[put_at[0]] <= walk_first;
      queue_count[put_at[0]] <= walk_count;
      put_at <= put_at + 1'b1;
    end
    if (asks) ask_at <= ask_at + 1'b1;
    if (page_done) page_at <= page_at + 1'b1;
    if (rst) begin
      walking <= 1'b0;
      put_at <= '0;
      ask_at <= '0;
      page_at <= '0;
      pages_in <= '0;
    end
  end

  // --- scores: storage and softmax

  logic q_take, score_q_ready, score_page_ready, score_valid, score_last;
  logic [31:0] score;
  logic [ID_W-1:0] score_id;
  logic [1:0] score_flags;
  logic [31:0] x_store [0:N_MAX*Q_HEADS-1];
  logic [X_W-1:0] x_in, scores;
  logic stats_valid, stats_last, stats_in, unused_x_ready, unused_q_ready, unused_part;
  logic [ID_W-1:0] stats_id, unused_part_id;
  logic [12:0] stats_max;
  logic [47:0] stats_sum;
  logic [5:0] unused_zeros;
  logic [24:0] unused_recip;
  logic [18:0] unused_acc;
  logic [6:0] unused_top;
  logic [59:0] unused_offset;
  logic [47:0] total [0:Q_HEADS-1];

  assign s_query_tready = phase == QUERY && score_q_ready;
  assign q_take = s_query_tvalid && s_query_tready;

  digit_scores #(
      .DIM(DIM), .PARTS(PARTS), .DIGITS(DIGITS), .Q_HEADS(Q_HEADS), .PAGE_BYTES(PAGE_BYTES), .SCALE_MANT(SCALE_MANT),
      .SCALE_EXP(SCALE_EXP)
  ) scoring (
      .clk(clk), .rst(rst), .s_q_tvalid(s_query_tvalid && phase == QUERY), .s_q_tready(score_q_ready),
      .s_q_tdata(s_query_tdata), .s_q_tlast(s_query_tlast), .s_page_tvalid(s_page_tvalid && phase == SCORE),
      .s_page_tready(score_page_ready), .s_page_tdata(s_page_tdata), .s_page_tuser(count), .s_page_tlast(s_page_tlast),
      .m_tvalid(score_valid), .m_tready(1'b1), .m_tdata(score), .m_tid(score_id), .m_tuser(score_flags),
      .m_tlast(unused_part), .part_valid(), .part_id(unused_part_id), .part_acc(unused_acc), .part_top(unused_top),
      .part_offset(unused_offset));

  assign score_last = x_in == scores - 1'b1;

  softmax_online #(.CONTEXTS(Q_HEADS)) softmax (
      .clk(clk), .rst(rst), .s_tvalid(score_valid), .s_tready(unused_x_ready), .s_tdata(score), .s_tid(score_id),
      .s_tlast(score_last), .m_tvalid(stats_valid), .m_tready(1'b1), .m_max(stats_max), .m_sum(stats_sum),
      .m_zeros(unused_zeros), .m_recip(unused_recip), .m_tid(stats_id), .m_tlast(stats_last));

  always_ff @(posedge clk) begin
    scores <= X_W'(seq_len * Q_HEADS);
    if (score_valid) begin
      x_store[x_in] <= score;
      x_in <= x_in + 1'b1;
    end
    if (stats_valid) begin
      top[stats_id] <= stats_max;
      total[stats_id] <= stats_sum;
      if (stats_last) stats_in <= 1'b1;
    end
    if (rst || (phase_begins && phase == QUERY)) begin
      x_in <= '0;
      stats_in <= 1'b0;
    end
  end

  // --- weights of scores: all for page selection, those of a value page, exact weights of refined pages

  localparam int USER_W = ID_W + 2;  // query, last, none: the page of the token is chosen
  logic read_go, read_last, read_1, read_last_1, none_1, value_begin, value_busy, weight_last;
  logic [X_W-1:0] read_at, read_left;
  logic [N_W-1:0] read_token;
  logic [ID_W-1:0] read_head, read_head_1;
  logic [31:0] x_1, exact;
  logic exact_valid, exact_over, gain_w_ready, size_w_ready;
  logic [ID_W-1:0] exact_id;
  logic valid_2, valid_3;
  logic [USER_W-1:0] user_2, user_3, e_user, user_a, user_b, user_c;
  logic [31:0] x_2;
  logic [12:0] top_2;
  logic [33:0] above_2;
  logic beyond_2;
  logic [32:0] x_3;
  logic e_valid, unused_e_ready;
  logic [36:0] e_data;
  logic token_map [0:N_MAX-1];

  assign read_go = read_left != '0 && (phase == CHOOSE ? gain_w_ready : phase == SUM) && !phase_begins;
  assign read_last = read_left == X_W'(1);
  assign value_begin = phase == SUM && size_w_ready && !value_busy && !phase_begins;
  assign above_2 = {{2{x_2[31]}}, x_2} - {top_2[12], top_2, 20'b0};
  assign beyond_2 = !above_2[33] && above_2[33:23] != '0;  // 2^8 or more

  always_ff @(posedge clk) begin
    if (read_go) begin
      read_at <= read_at + 1'b1;
      read_left <= read_left - 1'b1;
      read_head <= read_head == ID_W'(Q_HEADS - 1) ? '0 : read_head + 1'b1;
      if (read_head == ID_W'(Q_HEADS - 1)) read_token <= read_token + 1'b1;
    end
    if (phase_begins && phase == CHOOSE) begin
      read_at <= '0;
      read_left <= scores;
    end
    if (value_begin) begin
      value_busy <= 1'b1;
      read_at <= X_W'(queue_first[page_at[0]] * Q_HEADS);
      read_token <= queue_first[page_at[0]];
      read_left <= X_W'(count * Q_HEADS);
    end
    if (phase == SUM && weight_last) value_busy <= 1'b0;
    read_1 <= read_go;
    {read_last_1, read_head_1} <= {read_last, read_head};
    x_1 <= x_store[read_at];
    none_1 <= token_map[read_token] && phase == SUM;
    valid_2 <= phase == REFINE ? exact_valid : read_1;
    x_2 <= phase == REFINE ? exact : x_1;
    top_2 <= top[phase == REFINE ? exact_id : read_head_1];
    user_2 <= phase == REFINE ? {exact_id, 2'b00} : {read_head_1, read_last_1, none_1};
    valid_3 <= valid_2;
    x_3 <= beyond_2 ? 33'd8388607 : above_2[32:0];
    user_3 <= user_2;
    if (rst || phase_begins) begin
      {read_1, valid_2, valid_3, value_busy} <= '0;
      read_head <= '0;
      if (rst || phase != CHOOSE) read_left <= '0;
    end
  end

  exp2_unit #(.INT_W(13), .USER_W(USER_W)) exp2 (
      .clk(clk), .rst(rst || phase_begins), .s_tvalid(valid_3), .s_tready(unused_e_ready), .s_tdata(x_3),
      .s_tuser(user_3), .m_tvalid(e_valid), .m_tready(1'b1), .m_tdata(e_data), .m_tuser(e_user));

  // 2^f as a term of l (32 fractional bits), and rounded: 17 fractional bits for page selection, or 16 bits and a
  // position, at least 2^-24, as a weight of V
  logic [13:0] down, term_down;  // -f - 1, negative if f is not; 7 - f
  logic [4:0] drop_a, drop_b, lift_a, lift_b, lift_c;
  logic gone_a, gone_b, valid_a, valid_b, valid_c;
  logic [5:0] term_a;
  logic [23:0] mant_a;
  logic [24:0] raised_b;
  logic [39:0] term_b, term_c;
  logic [17:0] value_c;
  logic [ID_W-1:0] id_c;
  logic last_c;

  assign down = ~{e_data[36], e_data[36:24]};
  assign term_down = down + 14'd8;
  assign {id_c, last_c} = user_c[USER_W-1:1];
  assign weight_last = valid_c && last_c;

  always_ff @(posedge clk) begin
    {valid_a, valid_b, valid_c} <= {e_valid, valid_a, valid_b};
    {user_a, user_b, user_c} <= {e_user, user_a, user_b};
    drop_a <= phase == CHOOSE ? 5'(down + 14'd7) : !down[13] && down > 14'd8 ? 5'(down) : 5'd8;
    lift_a <= !down[13] && down > 14'd8 ? 5'd0 : 5'(14'd8 - down);
    gone_a <= (!down[13] && down > (phase == CHOOSE ? 14'd17 : 14'd24)) || e_user[0];
    term_a <= term_down > 14'd40 ? 6'd40 : term_down[5:0];
    mant_a <= e_data[23:0];
    raised_b <= {1'b0, mant_a} + (25'd1 << (drop_a - 5'd1));
    {drop_b, lift_b, gone_b} <= {drop_a, lift_a, gone_a};
    term_b <= {mant_a, 16'b0} >> term_a;
    value_c <= gone_b ? '0 : 18'(raised_b >> drop_b);
    lift_c <= lift_b;
    term_c <= term_b;
    if (rst || phase_begins) {valid_a, valid_b, valid_c} <= 3'b000;
  end

  // --- page selection

  logic [ID_W-1:0] l_head;
  logic l_done, l_ready, gain_valid, gain_last;
  logic [1:0] gain, gain_ends;
  logic [R_W-1:0] refined_in, map_page;
  logic [V_W-1:0] values_in;
  logic [N_W-1:0] map_token;
  logic [8:0] map_at;
  logic chosen_in, mapped;

  page_gains #(.Q_HEADS(Q_HEADS), .REFINED(REFINED), .VALUES(VALUES)) gains (
      .clk(clk), .rst(rst), .gain_threshold(gain_threshold), .mass_threshold(mass_threshold),
      .s_l_tvalid(phase == CHOOSE && !phase_begins && !l_done), .s_l_tready(l_ready), .s_l_tdata(total[l_head]),
      .s_w_tvalid(valid_c && phase == CHOOSE), .s_w_tready(gain_w_ready), .s_w_tdata(value_c[17] ? 17'h1FFFF : value_c[16:0]),
      .s_w_tlast(last_c), .m_tvalid(gain_valid), .m_tready(1'b1), .m_tdata(gain), .m_tkeep(gain_ends),
      .m_tlast(gain_last));

  assign mapped = map_token == seq_len;

  always_ff @(posedge clk) begin
    if (phase == CHOOSE && !phase_begins && !l_done && l_ready) begin
      l_head <= l_head + 1'b1;
      if (l_head == ID_W'(Q_HEADS - 1)) l_done <= 1'b1;
    end
    if (gain_valid) begin
      if (gain_ends[0]) begin
        refined_map[refined_in] <= gain[0];
        refined_in <= refined_in + 1'b1;
        chosen <= chosen + R_W'(gain[0]);
      end
      if (gain_ends[1]) begin
        value_map[values_in] <= gain[1];
        values_in <= values_in + 1'b1;
        reads <= reads + V_W'(gain[1]);
      end
      if (gain_last) chosen_in <= 1'b1;
    end
    if (map_page != refined_in && !mapped) begin
      token_map[map_token] <= refined_map[map_page];
      map_token <= map_token + 1'b1;
      map_at <= map_at == 9'(REFINED - 1) ? '0 : map_at + 1'b1;
      if (map_at == 9'(REFINED - 1)) map_page <= map_page + 1'b1;
    end
    if (rst || (phase_begins && phase == QUERY)) begin
      l_head <= '0;
      {l_done, chosen_in} <= 2'b00;
      refined_in <= '0;
      values_in <= '0;
      chosen <= '0;
      reads <= '0;
      map_token <= '0;
      map_page <= '0;
      map_at <= '0;
    end
  end

  // l: the terms of a page are ready at its selection, four cycles after its weights
  localparam int LATE = 4;
  localparam int LATE_W = ID_W + 34;
  logic [LATE*LATE_W-1:0] lates;
  logic late_valid, late_begins, late_last;
  logic [ID_W-1:0] late_id;
  logic [31:0] late_term;
  logic [8:0] late_at;
  logic [39:0] page_terms [0:Q_HEADS-1];

  assign {late_valid, late_last, late_id, late_term} = lates[(LATE-1)*LATE_W +: LATE_W];
  assign late_begins = late_at == '0;

  generate
    for (i = 0; i < Q_HEADS; i = i + 1) begin : g_rest
      always_ff @(posedge clk) begin
        if (late_valid && late_id == ID_W'(i)) page_terms[i] <= (late_begins ? 40'd0 : page_terms[i]) + {8'b0, late_term};
        if (gain_valid && gain_ends[0] && !gain[0]) rest[i] <= rest[i] + TOTAL_W'(page_terms[i]);
        if (phase == REFINE && valid_c && id_c == ID_W'(i)) rest[i] <= rest[i] + TOTAL_W'(term_c);
        if (phase_begins && phase == QUERY) rest[i] <= '0;
        if (rst) rest[i] <= '0;
      end
    end
  endgenerate

  always_ff @(posedge clk) begin
    lates <= {lates[(LATE-1)*LATE_W-1:0], valid_c && phase == CHOOSE, last_c, id_c, term_c[31:0]};
    if (late_valid && late_id == ID_W'(Q_HEADS - 1)) late_at <= late_last || late_at == 9'(REFINED - 1) ? '0 : late_at + 1'b1;
    if (rst) begin
      lates <= '0;
      late_at <= '0;
    end
  end

  // --- refined pages: exact scores of their K, then weighted sums of their V

  logic unpack_ready, row_valid, row_ready, row_v, row_end, row_last, row_inside, row_take, first_row;
  logic [16*LANES-1:0] row;
  logic [8:0] row_at;
  logic dot_ready, dot_valid, dot_bad, exact_ready, sum_row_ready, sum_valid, sum_ready, sum_bad, sum_last;
  logic [ACC_W-1:0] dot, sum;
  logic [ID_W-1:0] dot_id, sum_id;
  logic [R_W-1:0] refined_done;
  logic [21:0] waits [0:(1<<WAIT_W)-1];
  logic [WAIT_W-1:0] wait_in, wait_out;
  logic weight_ready, drain_valid, drain_ready;

  int8_unpack #(.DIM(D), .LANES(LANES), .PAGE_BYTES(PAGE_BYTES)) unpack (
      .clk(clk), .rst(rst), .s_tvalid(s_page_tvalid && phase == REFINE), .s_tready(unpack_ready), .s_tdata(s_page_tdata),
      .s_tlast(s_page_tlast), .m_tvalid(row_valid), .m_tready(row_ready), .m_tdata(row), .m_tuser(row_v),
      .m_end(row_end), .m_tlast(row_last));

  assign row_inside = row_at < count;
  assign row_ready = !row_inside || (row_v ? sum_row_ready : dot_ready);
  assign row_take = row_valid && row_ready;

  gemv_qk #(.DIM(D), .Q_HEADS(Q_HEADS), .LANES(LANES), .ACC_W(ACC_W)) dots (
      .clk(clk), .rst(rst), .s_q_tvalid(q_take), .s_q_tready(unused_q_ready), .s_q_tdata(s_query_tdata),
      .s_q_tlast(s_query_tlast), .s_k_tvalid(row_valid && row_inside && !row_v), .s_k_tready(dot_ready), .s_k_tdata(row),
      .s_k_tlast(row_end), .m_tvalid(dot_valid), .m_tready(exact_ready), .m_tdata(dot), .m_tid(dot_id),
      .m_tuser(dot_bad));

  fx_scale #(.ACC_W(ACC_W), .OUT_W(32), .OUT_FRAC(20), .USER_W(ID_W)) exact_scale (
      .clk(clk), .rst(rst), .s_tvalid(dot_valid), .s_tready(exact_ready), .s_tdata(dot), .s_mant(24'(SCALE_MANT)),
      .s_exp(7'(SCALE_EXP)), .s_tuser(dot_id), .m_tvalid(exact_valid), .m_tready(1'b1), .m_tdata(exact),
      .m_over(exact_over), .m_tuser(exact_id));

  gemv_av #(.RUN_MAX(D), .Q_HEADS(Q_HEADS), .LANES(LANES), .SIG_W(SIG_W), .ACC_W(ACC_W)) sums (
      .clk(clk), .rst(rst), .s_w_tvalid(wait_in != wait_out), .s_w_tready(weight_ready),
      .s_w_tdata({1'b0, waits[wait_out]}), .s_row_tvalid(row_valid && row_inside && row_v),
      .s_row_tready(sum_row_ready), .s_row_tdata(row), .s_row_tkeep({LANES{1'b1}}), .s_row_tuser(first_row),
      .s_row_tdest(1'b0), .s_row_tlast(row_end), .s_drain_tvalid(drain_valid), .s_drain_tready(drain_ready),
      .s_drain_tdata(DRAIN), .m_tvalid(sum_valid), .m_tready(sum_ready), .m_tdata(sum), .m_tid(sum_id),
      .m_tuser(sum_bad), .m_tlast(sum_last));

  always_ff @(posedge clk) begin
    if (row_take && row_end) begin
      row_at <= row_last ? '0 : row_at + 1'b1;
      if (row_v) first_row <= 1'b0;
    end
    if (row_take && row_last && row_v) refined_done <= refined_done + 1'b1;
    if (valid_c && phase == REFINE) begin
      waits[wait_in] <= {lift_c, value_c[16:0]};
      wait_in <= wait_in + 1'b1;
    end
    if (weight_ready && wait_in != wait_out) wait_out <= wait_out + 1'b1;
    if (rst || (phase_begins && phase == REFINE)) begin
      row_at <= '0;
      first_row <= 1'b1;
      refined_done <= '0;
      wait_in <= '0;
      wait_out <= '0;
    end
  end

  // --- value pages

  logic in_sizes, size_ready, value_ready, word_valid, word_ready, word_last, size_bad, value_valid, value_tready, value_last;
  logic [5:0] beat;
  logic [7*BLOCK-1:0] word;
  logic [5:0] word_power;
  logic [63:0] value;
  logic [ID_W-1:0] value_id;

  assign in_sizes = beat < 6'(HEAD);
  assign pages_due = phase == REFINE ? 16'(chosen) : 16'(reads * PARTS);

  value_weights #(.Q_HEADS(Q_HEADS), .HEAD(HEAD), .BLOCK(BLOCK)) weighing (
      .clk(clk), .rst(rst), .s_size_tvalid(s_page_tvalid && phase == SUM && in_sizes), .s_size_tready(size_ready),
      .s_size_tdata(s_page_tdata), .s_w_tvalid(valid_c && phase == SUM), .s_w_tready(size_w_ready),
      .s_w_sig(value_c[16:0]), .s_w_lift(lift_c), .s_w_tlast(last_c), .m_tvalid(word_valid), .m_tready(word_ready),
      .m_tdata(word), .m_tuser(word_power), .m_tlast(word_last), .bad(size_bad));

  value_sums #(.DIM(DIM), .PARTS(PARTS), .V_BITS(V_BITS), .Q_HEADS(Q_HEADS), .HEAD(HEAD)) summing (
      .clk(clk), .rst(rst), .s_w_tvalid(word_valid), .s_w_tready(word_ready), .s_w_tdata(word), .s_w_tuser(word_power),
      .s_w_tlast(word_last), .s_page_tvalid(s_page_tvalid && phase == SUM && (size_ready || !in_sizes)),
      .s_page_tready(value_ready), .s_page_tdata(s_page_tdata),
      .s_page_tuser({pages_in == pages_due - 1'b1, pages_in < 16'(PARTS), count}), .s_page_tdest(part),
      .s_page_tlast(s_page_tlast), .m_tvalid(value_valid), .m_tready(value_tready), .m_tdata(value), .m_tid(value_id),
      .m_tlast(value_last));

  always_ff @(posedge clk) begin
    if (s_page_tvalid && s_page_tready && phase == SUM) beat <= s_page_tlast ? '0 : in_sizes ? beat + 1'b1 : beat;
    if (rst) beat <= '0;
  end

  assign s_page_tready = phase == SCORE ? score_page_ready : phase == REFINE ? unpack_ready
      : phase == SUM && (in_sizes ? size_ready : value_ready);
  assign page_done = phase == REFINE ? row_take && row_last && row_v : page_take;

  // --- 1 / l of each query, and 1 / (l x sqrt(ROTATION))

  logic [ID_W-1:0] recip_head;
  logic asking, asked, ask, scaled_in, divide_ready, divide_valid, recip_one;
  logic [3:0] settled;
  logic [TOTAL_W-1:0] l, l_normal;
  logic [5:0] l_zeros;
  logic [47:0] quotient, turned;
  logic [23:0] mant_new;
  logic signed [7:0] exp_new;
  logic [2:0] turning;
  logic [23:0] mant [0:Q_HEADS-1];
  logic [6:0] exp [0:Q_HEADS-1];
  logic [23:0] value_mant [0:Q_HEADS-1];
  logic [6:0] value_exp [0:Q_HEADS-1];
  logic recip_over;

  normalize #(.W(TOTAL_W)) l_norm (.clk(clk), .en(1'b1), .value(l), .normal(l_normal), .zeros(l_zeros));

  serial_divide #(.NUM_W(48), .DEN_W(24)) divide (
      .clk(clk), .rst(rst), .s_tvalid(ask && !asked), .s_tready(divide_ready), .s_num(48'd1 << 47),
      .s_den(l == '0 ? 24'd1 : l_normal[TOTAL_W-1 -: 24]), .m_tvalid(divide_valid), .m_tready(1'b1), .m_tdata(quotient));

  assign ask = settled[3];

  always_ff @(posedge clk) begin
    l <= rest[recip_head];
    settled <= {settled[2:0], asking && !asked};
    if (!asking || asked) settled <= '0;
    if (ask && divide_ready) asked <= 1'b1;
    turning <= {turning[1:0], divide_valid};
    recip_over <= 1'b0;
    if (divide_valid) begin
      mant_new <= l == '0 ? '0 : quotient[24] ? 24'h800000 : quotient[23:0];
      exp_new <= l == '0 ? '0 : 8'sd47 - $signed({2'b00, l_zeros}) - $signed({7'b0, quotient[24]});
    end
    turned <= mant_new * 24'(ROT_MANT);
    if (turning[0] && exp_new[7]) begin
      exp_new <= '0;
      recip_over <= 1'b1;
    end
    if (turning[2]) begin
      mant[recip_head] <= mant_new;
      exp[recip_head] <= exp_new[6:0];
      value_mant[recip_head] <= turned[47] ? turned[47:24] : turned[46:23];
      value_exp[recip_head] <= exp_new[6:0] + 7'(ROT_EXP - 23) - {6'b0, turned[47]};
      recip_head <= recip_head + 1'b1;
      asked <= 1'b0;
      if (recip_head == ID_W'(Q_HEADS - 1)) begin
        asking <= 1'b0;
        scaled_in <= 1'b1;
      end
    end
    if (rst || (phase_begins && phase == OUT)) begin
      recip_head <= '0;
      asking <= !rst;
      {asked, scaled_in} <= 2'b00;
      settled <= '0;
      turning <= '0;
    end
  end

  // --- sums of value pages are rotated back, scaled and stored; then sums of refined pages enter; then output

  logic turned_valid, turned_ready, scale_in, scale_ready, scale_valid, scale_over, out_ready, out_en, out_valid, out_last;
  logic out_now, values_done, drain_asked, mixes, mix_ready, zero_in, both_over;
  logic [63+$clog2(ROTATION):0] turned_value;
  logic [ID_W-1:0] turned_id, in_id, zero_head;
  logic [OUT_A-1:0] out_at, zero_left;
  logic [47:0] scale_out, out_sum, out_clip;
  logic [47:0] kept [0:OUT_N-1];
  logic [47:0] kept_now;
  logic [48:0] both;
  logic [6:0] turned_at;  // channel of a value page
  logic [$clog2(D+1)-1:0] zero_at;

  hadamard #(.SIZE(ROTATION), .IN_W(64), .USER_W(ID_W)) rotate (
      .clk(clk), .rst(rst), .s_tvalid(value_valid), .s_tready(value_tready), .s_tdata(value), .s_tuser(value_id),
      .m_tvalid(turned_valid), .m_tready(turned_ready), .m_tdata(turned_value), .m_tuser(turned_id));

  assign mixes = scaled_in && values_done;
  assign turned_ready = scaled_in && !values_done && scale_ready;
  assign drain_valid = mixes && chosen != '0 && !drain_asked;
  assign zero_in = mixes && zero_left != '0;
  assign sum_ready = mixes && scale_ready;
  assign scale_in = values_done ? mixes && (sum_valid || zero_in) : scaled_in && turned_valid;
  assign in_id = !values_done ? turned_id : zero_in ? zero_head : sum_id;

  fx_scale #(.ACC_W(96), .OUT_W(48), .OUT_FRAC(30), .USER_W(1)) scaling (
      .clk(clk), .rst(rst || phase_begins), .s_tvalid(scale_in), .s_tready(scale_ready),
      .s_tdata(!values_done ? 96'($signed({turned_value, 24'b0})) : zero_in ? '0 : 96'($signed(sum))),
      .s_mant(values_done ? mant[in_id] : value_mant[in_id]), .s_exp(values_done ? exp[in_id] : value_exp[in_id]),
      .s_tuser(values_done), .m_tvalid(scale_valid), .m_tready(out_ready), .m_tdata(scale_out), .m_over(scale_over),
      .m_tuser(out_now));

  assign out_ready = !out_now || out_en;
  assign out_en = mix_ready || !out_valid;
  assign kept_now = reads == '0 ? '0 : kept[out_at];
  assign both = {scale_out[47], scale_out} + {kept_now[47], kept_now};
  assign both_over = both[48] != both[47] || both[47:0] == {1'b1, 47'b0};
  assign out_clip = both_over ? (both[48] ? 48'h800000000001 : 48'h7FFFFFFFFFFF) : both[47:0];

  always_ff @(posedge clk) begin
    if (scale_valid && out_ready) begin
      out_at <= out_at == OUT_A'(OUT_N - 1) ? '0 : out_at + 1'b1;
      if (!out_now) kept[out_at] <= SIGNS[turned_at[5:0]] ? -scale_out : scale_out;
      turned_at <= turned_at == 7'(DIM - 1) ? '0 : turned_at + 1'b1;
      if (!out_now && out_at == OUT_A'(OUT_N - 1)) values_done <= 1'b1;
    end
    if (drain_valid && drain_ready) drain_asked <= 1'b1;
    if (zero_in && scale_ready) begin
      zero_left <= zero_left - 1'b1;
      zero_at <= zero_at == ($clog2(D+1))'(D - 1) ? '0 : zero_at + 1'b1;
      if (zero_at == ($clog2(D+1))'(D - 1)) zero_head <= zero_head + 1'b1;
    end
    if (out_en) begin
      out_valid <= scale_valid && out_now;
      out_sum <= out_clip;
      out_last <= out_at == OUT_A'(OUT_N - 1);
    end
    if (rst || (phase_begins && phase == OUT)) begin
      out_at <= '0;
      turned_at <= '0;
      zero_left <= chosen == '0 ? OUT_A'(OUT_N) : '0;
      zero_at <= '0;
      zero_head <= '0;
      values_done <= reads == '0;
      drain_asked <= 1'b0;
      out_valid <= 1'b0;
    end
  end

  mix_out mix (
      .clk(clk), .rst(rst), .s_tvalid(out_valid), .s_tready(mix_ready), .s_out(out_sum), .s_rest(25'd0), .s_mean(16'd0),
      .s_tlast(out_last), .m_tvalid(m_out_tvalid), .m_tready(m_out_tready), .m_tdata(m_out_tdata),
      .m_tlast(m_out_tlast));

  // --- end of each phase, and error flags

  always_comb begin
    case (phase)
      QUERY: next = q_take && s_query_tlast;
      SCORE: next = stats_in && !walking && put_at == page_at;
      CHOOSE: next = chosen_in && mapped;
      REFINE: next = !walking && refined_done == chosen && pages_in == pages_due;
      SUM: next = !walking && pages_in == pages_due;
      OUT: next = m_out_tvalid && m_out_tready && m_out_tlast;
      default: next = 1'b0;
    endcase
  end

  always_ff @(posedge clk) begin
    bad <= (score_valid && score_flags[0]) || (dot_valid && exact_ready && dot_bad) || size_bad
        || (sum_valid && sum_ready && sum_bad);
    over <= (score_valid && score_flags[1]) || (exact_valid && exact_over) || (valid_2 && beyond_2)
        || (scale_valid && out_ready && scale_over) || (scale_valid && out_now && out_en && both_over) || recip_over;
    if (rst) {bad, over} <= 2'b00;
  end
endmodule
