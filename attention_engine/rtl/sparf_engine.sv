`include "check.svh"

// SparF attention (InstInfer, Algorithm 1) for the page stream of one head: Q_HEADS queries share keys and values.
//
// s_query: values of all queries for each channel, then the mean of V, all FP16; s_query_tlast ends it. m_req requests
// a page, {kind, group, page}: kind 0 is a page of channels of K for a group of tokens, 1 and 2 are pages of tokens of
// K and of V. s_page supplies the pages in that order, LANES values per beat, PAGE_VALUES / LANES beats each. m_out:
// the output, query by query, FP16. Registers: sparf_ctrl. Phases: channel selection while q arrives; approximate
// scores from pages of these channels, and their softmax; token selection; exact scores of these tokens from K, and
// their softmax; V.
module sparf_engine #(
    parameter int DIM = 128,
    parameter int Q_HEADS = 1,
    parameter int LANES = 32,
    parameter int N_MAX = 2048,
    parameter int PAGE_VALUES = 2048,
    parameter int WAYS = 8,
    parameter int SCALE_MANT = 8557531,
    parameter int SCALE_EXP = 26
) (
    input  logic                clk,
    input  logic                rst,
    input  logic                s_axil_awvalid,
    output logic                s_axil_awready,
    input  logic [7:0]          s_axil_awaddr,
    input  logic                s_axil_wvalid,
    output logic                s_axil_wready,
    input  logic [31:0]         s_axil_wdata,
    output logic                s_axil_bvalid,
    input  logic                s_axil_bready,
    output logic [1:0]          s_axil_bresp,
    input  logic                s_axil_arvalid,
    output logic                s_axil_arready,
    input  logic [7:0]          s_axil_araddr,
    output logic                s_axil_rvalid,
    input  logic                s_axil_rready,
    output logic [31:0]         s_axil_rdata,
    output logic [1:0]          s_axil_rresp,
    input  logic                s_query_tvalid,
    output logic                s_query_tready,
    input  logic [15:0]         s_query_tdata,
    input  logic                s_query_tlast,
    output logic                m_req_tvalid,
    input  logic                m_req_tready,
    output logic [33:0]         m_req_tdata,
    input  logic                s_page_tvalid,
    output logic                s_page_tready,
    input  logic [16*LANES-1:0] s_page_tdata,
    input  logic                s_page_tlast,
    output logic                m_out_tvalid,
    input  logic                m_out_tready,
    output logic [15:0]         m_out_tdata,
    output logic                m_out_tlast
);
  `include "fp16.svh"

  localparam logic [2:0] IDLE = 3'd0, CHANNELS = 3'd1, SCORE = 3'd2, WEIGH = 3'd3, KEYS = 3'd4, VALUES = 3'd5;
  localparam int ACC_W = 88;
  localparam int SIG_W = 17;
  localparam int KEY_W = 30;
  localparam int N_W = $clog2(N_MAX + 1);
  localparam int RUN_W = $clog2(PAGE_VALUES + 1);
  localparam int ID_W = Q_HEADS > 1 ? $clog2(Q_HEADS) : 1;
  localparam int Q_LOG = $clog2(Q_HEADS);
  localparam int DIM_W = $clog2(DIM);
  localparam int X_W = $clog2(N_MAX * Q_HEADS);
  localparam int POS_W = PAGE_VALUES > LANES ? $clog2(PAGE_VALUES / LANES) : 1;
  localparam int LANE_LOG = $clog2(LANES);

  `CHECK(DIM % LANES == 0 && DIM <= 128, "sparf_engine: DIM must be a multiple of LANES, at most 128")
  `CHECK(Q_HEADS >= 1 && Q_HEADS <= 8, "sparf_engine: Q_HEADS must be 1 to 8")
  `CHECK(PAGE_VALUES / 8 >= LANES, "sparf_engine: a run of an eighth of a page must fill a beat")

  logic [2:0] phase;
  logic phase_begins, stage_done, over;
  logic [N_W-1:0] r, k, seq_len;
  logic [1:0] m_log;
  logic bad, unused_q_ready, unused_x_ready;
  logic stats_valid, stats_last;
  logic [ID_W-1:0] stats_id;
  logic [12:0] stats_max;
  logic [47:0] stats_sum;
  genvar i;

  // --- control, argtopk, filter

  logic topk_tvalid, topk_tready, topk_abs, key_line_valid, mask_valid, mask_last;
  logic [N_W-1:0] topk_n, topk_k, topk_recent;
  logic [WAYS*KEY_W-1:0] key_line;
  logic [WAYS-1:0] mask;
  logic page_tvalid, page_tready;
  logic [63:0] page_wanted;
  logic [RUN_W-1:0] page_length;
  logic [15:0] page_tid;

  sparf_ctrl #(.DIM(DIM), .Q_HEADS(Q_HEADS), .N_MAX(N_MAX), .PAGE_VALUES(PAGE_VALUES), .WAYS(WAYS)) ctrl (
      .clk(clk), .rst(rst),
      .s_axil_awvalid(s_axil_awvalid), .s_axil_awready(s_axil_awready), .s_axil_awaddr(s_axil_awaddr),
      .s_axil_wvalid(s_axil_wvalid), .s_axil_wready(s_axil_wready), .s_axil_wdata(s_axil_wdata),
      .s_axil_bvalid(s_axil_bvalid), .s_axil_bready(s_axil_bready), .s_axil_bresp(s_axil_bresp),
      .s_axil_arvalid(s_axil_arvalid), .s_axil_arready(s_axil_arready), .s_axil_araddr(s_axil_araddr),
      .s_axil_rvalid(s_axil_rvalid), .s_axil_rready(s_axil_rready), .s_axil_rdata(s_axil_rdata),
      .s_axil_rresp(s_axil_rresp),
      .phase(phase), .phase_begins(phase_begins), .r(r), .k(k), .seq_len(seq_len), .m_log(m_log),
      .stage_done(stage_done), .bad(bad), .over(over),
      .row_valid(stats_valid && phase == KEYS), .row_id(stats_id), .row_max(stats_max), .row_sum(stats_sum),
      .topk_tvalid(topk_tvalid), .topk_tready(topk_tready), .topk_n(topk_n), .topk_k(topk_k),
      .topk_recent(topk_recent), .topk_abs(topk_abs),
      .s_mask_tvalid(mask_valid), .s_mask_tdata(mask), .s_mask_tlast(mask_last),
      .m_req_tvalid(m_req_tvalid), .m_req_tready(m_req_tready), .m_req_tdata(m_req_tdata),
      .m_page_tvalid(page_tvalid), .m_page_tready(page_tready), .m_page_wanted(page_wanted),
      .m_page_length(page_length), .m_page_tid(page_tid));

  logic topk_load;

  argtopk #(.N_MAX(N_MAX), .WAYS(WAYS), .DIGIT(KEY_W / 3)) topk (
      .clk(clk), .rst(rst), .cfg_tvalid(topk_tvalid), .cfg_tready(topk_tready), .cfg_n(topk_n), .cfg_k(topk_k),
      .cfg_recent(topk_recent), .cfg_abs(topk_abs), .s_tvalid(key_line_valid), .s_tready(topk_load),
      .s_tdata(key_line), .m_tvalid(mask_valid), .m_tready(1'b1), .m_tdata(mask), .m_tlast(mask_last));

  logic pass_valid, pass_ready, pass_end, pass_last;
  logic [16*LANES-1:0] pass;
  logic [LANES-1:0] pass_keep;
  logic [15:0] pass_first;
  logic [5:0] pass_run;

  nfc_filter #(.LANES(LANES), .RUNS(64), .RUN_W(RUN_W), .TID_W(16)) filter (
      .clk(clk), .rst(rst), .cfg_tvalid(page_tvalid), .cfg_tready(page_tready), .cfg_wanted(page_wanted),
      .cfg_length(page_length), .cfg_tid(page_tid), .s_tvalid(s_page_tvalid), .s_tready(s_page_tready),
      .s_tdata(s_page_tdata), .s_tkeep({LANES{1'b1}}), .s_tlast(s_page_tlast), .m_tvalid(pass_valid),
      .m_tready(pass_ready), .m_tdata(pass), .m_tkeep(pass_keep), .m_tid(pass_first), .m_tuser(pass_run),
      .m_end(pass_end), .m_tlast(pass_last));

  // Beats wait in a short queue during the lookup of the weight of their row
  logic beat_ready, row_valid, row_ready, row_end;
  logic [16*LANES-1:0] row;
  logic [X_W-1:0] row_x;  // index of the token x Q_HEADS
  logic [15:0] pass_unit;
  logic pass_begins, unit_ready, unit_valid, unit_done;
  logic [DIM_W-1:0] unit;  // channel of the next row to be weighted

  assign pass_unit = pass_first + 16'(pass_run);
  assign pass_ready = beat_ready && unit_ready;

  always_ff @(posedge clk) begin
    if (pass_valid && pass_ready) pass_begins <= pass_end;
    if (rst) pass_begins <= 1'b1;
  end

  skid #(.W(16 * LANES + X_W + 1)) beats (
      .clk(clk), .rst(rst), .s_tvalid(pass_valid && pass_ready), .s_tready(beat_ready),
      .s_tdata({pass, X_W'(pass_unit * Q_HEADS), pass_end}), .m_tvalid(row_valid), .m_tready(row_ready),
      .m_tdata({row, row_x, row_end}));

  skid #(.W(DIM_W)) units (
      .clk(clk), .rst(rst), .s_tvalid(pass_valid && pass_ready && pass_begins && phase == SCORE), .s_tready(unit_ready),
      .s_tdata(pass_unit[DIM_W-1:0]), .m_tvalid(unit_valid), .m_tready(unit_done), .m_tdata(unit));

  // --- input of q and the mean of V: norms, and keys of the channels

  logic [15:0] q_store [0:(DIM<<Q_LOG)-1];  // {channel, query}
  logic [15:0] mean_store [0:DIM-1];
  logic [47:0] whole [0:Q_HEADS-1];
  logic [47:0] kept [0:Q_HEADS-1];
  logic [DIM_W-1:0] channel_in;
  logic [ID_W:0] part;
  logic q_take, is_mean, q_last, q_bad, channels_in;

  assign s_query_tready = phase == CHANNELS && topk_load && !channels_in;
  assign q_take = s_query_tvalid && s_query_tready;
  assign is_mean = part == (ID_W+1)'(Q_HEADS);
  assign q_last = channel_in == DIM_W'(DIM - 1) && part == (ID_W+1)'(Q_HEADS - 1);

  always_ff @(posedge clk) begin
    q_bad <= q_take && fp16_bad(s_query_tdata);
    if (q_take) begin
      if (is_mean) mean_store[channel_in] <= s_query_tdata;
      else q_store[(32'(channel_in) << Q_LOG) | 32'(part)] <= s_query_tdata;
      part <= is_mean ? '0 : part + 1'b1;
      if (is_mean) channel_in <= channel_in + 1'b1;
      if (s_query_tlast) channels_in <= 1'b1;
    end
    if (rst || phase == IDLE) begin
      channel_in <= '0;
      part <= '0;
      channels_in <= 1'b0;
    end
  end

  // Norms of q during input, and later of its selected channels during use: a value, its magnitude, sums
  logic [15:0] channel_q, value_1;
  logic [47:0] size_2, channel_sum;
  logic [ID_W-1:0] id_1, id_2;
  logic [3:0] counts;  // {whole, kept} of value_1, then of size_2
  logic begins_1, begins_2, channel_1, channel_2;
  logic keep_take, keep_first;
  logic [ID_W-1:0] unit_id;

  always_ff @(posedge clk) begin
    value_1 <= phase == CHANNELS ? s_query_tdata : channel_q;
    id_1 <= phase == CHANNELS ? part[ID_W-1:0] : unit_id;
    begins_1 <= phase == CHANNELS ? channel_in == '0 : keep_first;
    channel_1 <= part == '0;
    size_2 <= 48'(fp16_sig(value_1)) << fp16_shift(value_1);
    {id_2, begins_2, channel_2} <= {id_1, begins_1, channel_1};
    counts <= {counts[1:0], q_take && !is_mean, keep_take};
    if (counts[3]) begin
      whole[id_2] <= (begins_2 ? 48'd0 : whole[id_2]) + size_2;
      channel_sum <= (channel_2 ? 48'd0 : channel_sum) + size_2;
    end
    if (counts[2]) kept[id_2] <= (begins_2 ? 48'd0 : kept[id_2]) + size_2;
    if (rst) counts <= '0;
  end

  // A sum of magnitudes as a key: its leading one, and the next 20 bits
  logic [4:0] channel_ends;  // end of a channel; its sum; three cycles for the leading one
  logic [47:0] channel_normal;
  logic [5:0] channel_zeros;
  logic token_valid, key_valid;
  logic [KEY_W-1:0] token_key, key;

  normalize #(.W(48)) channel_norm (
      .clk(clk), .en(1'b1), .value(channel_sum), .normal(channel_normal), .zeros(channel_zeros));

  always_ff @(posedge clk) begin
    channel_ends <= {channel_ends[3:0], q_take && is_mean};
    key_valid <= phase == CHANNELS ? channel_ends[4] : token_valid;
    key <= phase != CHANNELS ? token_key
        : channel_zeros == '1 ? '0 : {1'b0, 9'd48 - {3'b0, channel_zeros}, channel_normal[46:27]};
    if (rst) begin
      channel_ends <= '0;
      key_valid <= 1'b0;
    end
  end

  key_packer #(.WAYS(WAYS), .KEY_W(KEY_W), .N_W(N_W)) packer (
      .clk(clk), .rst(rst), .n(topk_n), .s_tvalid(key_valid), .s_tdata(key), .m_tvalid(key_line_valid),
      .m_tdata(key_line));

  // --- products: of rows and q (exact scores), and sums of weighted rows (approximate scores, output)

  logic dot_ready, dot_valid, dot_bad, sum_row_ready, sum_valid, sum_ready, sum_bad, sum_last;
  logic [ACC_W-1:0] dot, sum;
  logic [ID_W-1:0] dot_id, sum_id;
  logic weight_valid, weight_ready;
  logic [SIG_W+5:0] weight;
  logic [LANES-1:0] row_keep;
  logic [N_W-1:0] rows, rows_last;
  logic row_take, rows_first, rows_end, all_rows, room, first_group;
  logic [1:0] banks_full;
  logic bank, group_stored, group_drained;
  logic signed [16:0] group_left, group_next, row_left;  // remaining tokens from the start of the group or beat
  logic [15:0] group_tokens;

  gemv_qk #(.DIM(DIM), .Q_HEADS(Q_HEADS), .LANES(LANES), .ACC_W(ACC_W)) dots (
      .clk(clk), .rst(rst), .s_q_tvalid(q_take && !is_mean), .s_q_tready(unused_q_ready), .s_q_tdata(s_query_tdata),
      .s_q_tlast(q_last), .s_k_tvalid(row_valid && phase == KEYS), .s_k_tready(dot_ready), .s_k_tdata(row),
      .s_k_tlast(row_end), .m_tvalid(dot_valid), .m_tready(1'b1), .m_tdata(dot), .m_tid(dot_id), .m_tuser(dot_bad));

  logic drain_valid, drain_ready, drain_bank;
  logic [POS_W-1:0] drain_beats;

  gemv_av #(.RUN_MAX(PAGE_VALUES), .Q_HEADS(Q_HEADS), .LANES(LANES), .SIG_W(SIG_W), .ACC_W(ACC_W)) sums (
      .clk(clk), .rst(rst), .s_w_tvalid(weight_valid), .s_w_tready(weight_ready), .s_w_tdata(weight),
      .s_row_tvalid(row_valid && room && (phase == SCORE || phase == VALUES)), .s_row_tready(sum_row_ready),
      .s_row_tdata(row), .s_row_tkeep(row_keep), .s_row_tuser(rows_first), .s_row_tdest(bank), .s_row_tlast(row_end),
      .s_drain_tvalid(drain_valid), .s_drain_tready(drain_ready), .s_drain_tdata({drain_bank, drain_beats}),
      .m_tvalid(sum_valid), .m_tready(sum_ready), .m_tdata(sum), .m_tid(sum_id), .m_tuser(sum_bad), .m_tlast(sum_last));

  assign row_ready = phase == KEYS ? dot_ready : room && sum_row_ready;
  assign row_take = row_valid && row_ready;
  assign rows_first = rows == '0;
  assign rows_end = row_end && rows == rows_last;
  assign all_rows = row_take && rows_end;
  assign room = banks_full != 2'd2;
  assign group_stored = all_rows && phase == SCORE;

  assign group_tokens = 16'(PAGE_VALUES) >> m_log;

  // Values after the last token of the sequence are undefined
  generate
    for (i = 0; i < LANES; i = i + 1) begin : g_inside
      assign row_keep[i] = phase != SCORE || row_left > i;
    end
  endgenerate

  // Weights of channels: their q, which is added to the norms during the rows of the first group
  logic [DIM_W:0] weighed;
  logic weigh_en, unit_take;

  assign channel_q = q_store[(32'(unit) << Q_LOG) | 32'(unit_id)];
  assign unit_take = unit_valid && weigh_en;
  assign unit_done = weigh_en && unit_id == ID_W'(Q_HEADS - 1);
  assign keep_take = unit_take && N_W'(weighed) != r;
  assign keep_first = weighed == '0;

  always_ff @(posedge clk) begin
    if (unit_take) begin
      unit_id <= unit_done ? '0 : unit_id + 1'b1;
      if (unit_done && N_W'(weighed) != r) weighed <= weighed + 1'b1;
    end
    if (rst || phase_begins) begin
      unit_id <= '0;
      weighed <= '0;
    end
  end

  always_ff @(posedge clk) begin
    rows_last <= (phase == SCORE ? r : k) - 1'b1;
    if (row_take) begin
      row_left <= !row_end ? row_left - 17'(LANES) : rows_end ? group_next : group_left;
      if (row_end) rows <= all_rows ? '0 : rows + 1'b1;
    end
    banks_full <= banks_full + {1'b0, group_stored} - {1'b0, group_drained};
    if (group_stored) begin
      bank <= !bank;
      first_group <= 1'b0;
      group_left <= group_next;
      group_next <= group_next - $signed({1'b0, group_tokens});
    end
    if (rst || phase == IDLE || phase_begins) begin
      rows <= '0;
      banks_full <= '0;
      bank <= 1'b0;
      first_group <= 1'b1;
      group_left <= 17'(seq_len);
      group_next <= 17'(seq_len) - $signed({1'b0, group_tokens});
      row_left <= 17'(seq_len);
    end
  end

  // --- scales of approximate scores, of exact scores and of the output

  logic [23:0] mant [0:Q_HEADS-1];
  logic [6:0] exp [0:Q_HEADS-1];
  logic scale_ask, scale_ready, scale_valid, scales_ready, asking;
  logic [2:0] asks;  // summation of the last norm
  logic [ID_W-1:0] scale_id, mix_id;
  logic [23:0] scale_mant, mix_mant;
  logic [6:0] scale_exp, mix_exp;
  logic mix_valid;

  score_scale #(.SCALE_MANT(SCALE_MANT), .SCALE_EXP(SCALE_EXP)) scales (
      .clk(clk), .rst(rst), .s_tvalid(scale_ask), .s_tready(scale_ready), .s_whole(whole[scale_id]),
      .s_kept(kept[scale_id]), .m_tvalid(scale_valid), .m_tready(1'b1), .m_mant(scale_mant), .m_exp(scale_exp));

  assign scale_ask = asking && phase == SCORE && !scale_valid;

  always_ff @(posedge clk) begin
    asks <= {asks[1:0], group_stored && first_group};
    if (asks[2]) asking <= 1'b1;
    if (scale_valid) begin
      mant[scale_id] <= scale_mant;
      exp[scale_id] <= scale_exp;
      scale_id <= scale_id + 1'b1;
      if (scale_id == ID_W'(Q_HEADS - 1)) begin
        asking <= 1'b0;
        scales_ready <= 1'b1;
      end
    end
    if (mix_valid) begin
      mant[mix_id] <= mix_mant;
      exp[mix_id] <= mix_exp;
    end
    if (rst || phase_begins) begin
      asks <= '0;
      asking <= 1'b0;
      scales_ready <= 1'b0;
      scale_id <= '0;
    end
  end

  // --- drain and scaling of sums

  logic drain_out, values_in, drain_busy, drain_done, drain_start, drain_inside, drain_turns;
  logic [16:0] drain_left, sum_left;  // remaining tokens from the start of the group or sum
  logic [X_W-1:0] drain_x, sum_x, dot_x;
  logic [POS_W+LANE_LOG-1:0] drain_pos;
  logic [POS_W-1:0] drain_end;
  logic scaled_valid, scaled_over, fx_ready, out_ready, in_valid, in_last;
  logic [47:0] scaled;
  logic [X_W+ID_W:0] scale_user, scaled_user;
  logic [X_W:0] scores;  // scores of the phase: tokens x queries

  assign drain_out = phase == VALUES && values_in;
  assign drain_beats = phase == VALUES ? POS_W'(DIM / LANES - 1)
      : drain_left <= {1'b0, group_tokens} ? POS_W'((drain_left - 1'b1) >> LANE_LOG)
      : POS_W'((PAGE_VALUES >> LANE_LOG >> m_log) - 1);
  assign drain_valid = !drain_busy && (phase == SCORE ? banks_full != 0 && scales_ready : drain_out);
  assign drain_start = drain_valid && drain_ready;
  assign drain_turns = drain_pos == {drain_end, {LANE_LOG{1'b1}}};  // switch to the next query
  assign group_drained = drain_done && phase == SCORE;
  assign sum_ready = fx_ready || !drain_inside;
  assign in_valid = phase == KEYS ? dot_valid : sum_valid && drain_inside;
  assign in_last = phase == KEYS ? (X_W+1)'(dot_x) + 1'b1 == scores
      : phase == SCORE ? sum_left == 17'd1 && sum_id == ID_W'(Q_HEADS - 1) : sum_last;
  assign scale_user = phase == KEYS ? {in_last, dot_id, dot_x}
      : phase == SCORE ? {in_last, sum_id, sum_x} : {in_last, sum_id, X_W'(drain_pos)};

  always_ff @(posedge clk) begin
    scores <= (X_W+1)'((phase == WEIGH ? seq_len : k) * Q_HEADS);
    if (drain_start) begin
      drain_busy <= 1'b1;
      drain_end <= drain_beats;
    end
    if (sum_valid && sum_ready) begin
      drain_pos <= drain_pos + 1'b1;
      sum_left <= sum_left - 1'b1;
      sum_x <= sum_x + X_W'(Q_HEADS);
      drain_inside <= phase == VALUES || (drain_inside && sum_left != 17'd1);
      if (drain_turns) begin
        drain_pos <= '0;
        sum_left <= drain_left;
        sum_x <= drain_x + X_W'(sum_id) + 1'b1;
        drain_inside <= 1'b1;
      end
    end
    drain_done <= sum_valid && sum_ready && sum_last;
    if (drain_done) begin
      drain_busy <= 1'b0;
      drain_bank <= !drain_bank;
      drain_left <= drain_left - {1'b0, group_tokens};
      drain_x <= drain_x + X_W'(group_tokens * Q_HEADS);
    end
    if (drain_start) begin
      sum_left <= drain_left;
      sum_x <= drain_x;
    end
    if (all_rows && phase == VALUES) values_in <= 1'b1;
    if (drain_start) values_in <= 1'b0;
    if (dot_valid) dot_x <= dot_x + 1'b1;
    if (rst || phase == IDLE || phase_begins) begin
      {drain_busy, drain_done} <= 2'b00;
      drain_pos <= '0;
      drain_bank <= 1'b0;
      drain_left <= 17'(seq_len);
      drain_x <= '0;
      drain_inside <= 1'b1;
      values_in <= 1'b0;
      dot_x <= '0;
    end
  end

  fx_scale #(.ACC_W(ACC_W), .OUT_W(48), .OUT_FRAC(30), .USER_W(X_W + ID_W + 1)) scaling (
      .clk(clk), .rst(rst), .s_tvalid(in_valid), .s_tready(fx_ready), .s_tdata(phase == KEYS ? dot : sum),
      .s_mant(phase == KEYS ? 24'(SCALE_MANT) : mant[sum_id]), .s_exp(phase == KEYS ? 7'(SCALE_EXP) : exp[sum_id]),
      .s_tuser(scale_user), .m_tvalid(scaled_valid), .m_tready(out_ready), .m_tdata(scaled), .m_over(scaled_over),
      .m_tuser(scaled_user));

  assign bad = q_bad || (dot_valid && dot_bad) || (sum_valid && sum_ready && sum_bad);

  // --- scores x: storage and softmax statistics

  logic [31:0] x_store [0:N_MAX*Q_HEADS-1];
  logic [31:0] x, x_read;
  logic scores_valid, x_beyond, x_valid, x_over, x_last;
  logic [ID_W-1:0] x_id;
  logic [X_W-1:0] x_addr, x_read_addr;
  logic [5:0] stats_zeros;
  logic [24:0] stats_recip;

  assign scores_valid = scaled_valid && (phase == SCORE || phase == KEYS);
  assign x_beyond = scaled[47:41] != {7{scaled[47]}};
  assign over = (scaled_valid && out_ready && scaled_over) || (x_valid && x_over);

  always_ff @(posedge clk) begin
    x_valid <= scores_valid;
    x_over <= x_beyond;
    x <= x_beyond ? {scaled[47], {31{!scaled[47]}}} : scaled[41:10];
    {x_last, x_id, x_addr} <= scaled_user;
    if (rst) x_valid <= 1'b0;
  end

  softmax_online #(.CONTEXTS(Q_HEADS)) softmax (
      .clk(clk), .rst(rst), .s_tvalid(x_valid), .s_tready(unused_x_ready), .s_tdata(x), .s_tid(x_id), .s_tlast(x_last),
      .m_tvalid(stats_valid), .m_tready(1'b1), .m_max(stats_max), .m_sum(stats_sum), .m_zeros(stats_zeros),
      .m_recip(stats_recip), .m_tid(stats_id), .m_tlast(stats_last));

  logic [47:0] total [0:Q_HEADS-1];
  logic [12:0] top [0:Q_HEADS-1];
  logic [5:0] zeros [0:Q_HEADS-1];
  logic [24:0] recip [0:Q_HEADS-1];

  always_ff @(posedge clk) begin
    if (x_valid) x_store[x_addr] <= x;
    if (read_en) x_read <= x_store[x_read_addr];
    if (stats_valid) begin
      top[stats_id] <= stats_max;
      if (phase == SCORE) begin
        zeros[stats_id] <= stats_zeros;
        recip[stats_id] <= stats_recip;
        total[stats_id] <= stats_sum;
      end
    end
  end

  // --- weights 2^(x - m): scores of tokens, total weight of the selected tokens (alpha), weights of V
  // A read passes through storage, exponential and rounding; only the weights of V can stall.

  logic [X_W-1:0] alpha_x;
  logic [X_W:0] reads;
  logic [ID_W-1:0] read_id, read_id_1, read_id_2, e_id;
  logic read_go, read_1, read_2, read_en, e_valid, e_ready;
  logic [31:0] x_2;
  logic [12:0] top_2;
  logic [36:0] e_data;
  logic alpha_go;

  assign read_go = phase == WEIGH ? topk_load && reads != scores && !phase_begins
      : phase == KEYS ? alpha_go : phase == VALUES && reads != scores && !phase_begins;
  assign x_read_addr = phase == KEYS ? alpha_x + X_W'(read_id) : reads[X_W-1:0];

  always_ff @(posedge clk) begin
    if (read_en) begin
      {read_1, read_2} <= {read_go, read_1};
      {read_id_1, read_id_2} <= {read_id, read_id_1};
      x_2 <= x_read;
      top_2 <= top[read_id_1];
      if (read_go) begin
        reads <= reads + 1'b1;
        read_id <= read_id == ID_W'(Q_HEADS - 1) ? '0 : read_id + 1'b1;
      end
    end
    if (row_take && row_end && phase == KEYS) begin
      alpha_go <= 1'b1;
      alpha_x <= row_x;
    end else if (read_id == ID_W'(Q_HEADS - 1)) alpha_go <= 1'b0;
    if (rst || phase_begins) begin
      reads <= '0;
      read_id <= '0;
      {read_1, read_2} <= 2'b00;
      alpha_go <= 1'b0;
    end
  end

  exp2_unit #(.INT_W(13), .USER_W(ID_W)) exp2 (
      .clk(clk), .rst(rst || phase_begins), .s_tvalid(read_2), .s_tready(read_en),
      .s_tdata({x_2[31], x_2} - {top_2, 20'b0}), .s_tuser(read_id_2), .m_tvalid(e_valid), .m_tready(e_ready),
      .m_tdata(e_data), .m_tuser(e_id));

  // Score of a token
  logic part_valid, part_last;
  logic [36:0] part_data;
  logic [24:0] part_recip;
  logic [5:0] part_zeros;

  always_ff @(posedge clk) begin
    part_valid <= e_valid && phase == WEIGH;
    part_last <= e_id == ID_W'(Q_HEADS - 1);
    part_data <= e_data;
    part_recip <= recip[e_id];
    part_zeros <= zeros[e_id];
    if (rst || phase_begins) part_valid <= 1'b0;
  end

  group_score #(.INT_W(13)) score (
      .clk(clk), .rst(rst || phase_begins), .s_tvalid(part_valid), .s_tdata(part_data), .s_recip(part_recip),
      .s_zeros(part_zeros), .s_tlast(part_last), .m_tvalid(token_valid), .m_tdata(token_key));

  // 2^f as a weight of 16 bits, at least 2^-24, rounded to nearest
  logic [12:0] down;
  logic [4:0] drop, lift, drop_0, drop_1, lift_0, lift_1;
  logic [23:0] mant_0;
  logic [24:0] raised;
  logic weigh_0, weigh_1;

  assign down = ~e_data[36:24];  // -f - 1
  assign drop = down > 13'd24 ? 5'd25 : down < 13'd8 ? 5'd8 : down[4:0];
  assign lift = down < 13'd8 ? 5'd8 - down[4:0] : 5'd0;
  assign e_ready = phase != VALUES || weigh_en;

  always_ff @(posedge clk) begin
    if (weigh_en) begin
      {weigh_0, weigh_1} <= {e_valid && phase == VALUES, weigh_0};
      {drop_0, lift_0, mant_0} <= {drop, lift, e_data[23:0]};
      {drop_1, lift_1} <= {drop_0, lift_0};
      raised <= {1'b0, mant_0} + (25'd1 << (drop_0 - 5'd1));
    end
    if (rst || phase_begins) {weigh_0, weigh_1} <= 2'b00;
  end

  skid #(.W(SIG_W + 6)) weights (
      .clk(clk), .rst(rst || phase_begins), .s_tvalid(phase == SCORE ? unit_valid : weigh_1), .s_tready(weigh_en),
      .s_tdata(phase == SCORE ? {channel_q[15], fp16_shift(channel_q), {(SIG_W-11){1'b0}}, fp16_sig(channel_q)}
          : {1'b0, lift_1, SIG_W'(raised >> drop_1)}),
      .m_tvalid(weight_valid), .m_tready(weight_ready), .m_tdata(weight));

  // alpha: the sum of the selected weights
  logic [47:0] alpha_sum [0:Q_HEADS-1];
  logic [Q_HEADS-1:0] alpha_seen;
  logic [31:0] alpha_term;
  logic [ID_W-1:0] alpha_id;
  logic alpha_valid;

  always_ff @(posedge clk) begin
    alpha_valid <= e_valid && phase == KEYS;
    alpha_id <= e_id;
    alpha_term <= down > 13'd31 ? 32'd0 : {e_data[23:0], 8'b0} >> down[4:0];
    if (alpha_valid) begin
      alpha_sum[alpha_id] <= (alpha_seen[alpha_id] ? alpha_sum[alpha_id] : 48'd0) + {16'd0, alpha_term};
      alpha_seen[alpha_id] <= 1'b1;
    end
    if (rst) alpha_valid <= 1'b0;
    if (rst || (phase_begins && phase == KEYS)) alpha_seen <= '0;
  end

  // --- alpha = sum / l, and the output scale alpha / l' of the exact scores: one query at a time, as l' arrives
  // The inputs of a query stay constant while its values pass the registers; `mixing` is their stage.

  logic [24:0] rest [0:Q_HEADS-1];
  logic [12:0] mixing;
  logic mixing_last, mix_done;
  logic [ID_W-1:0] mixing_id;
  logic [47:0] part_sum, part_all, alpha_part, aligned;
  logic [24:0] all_recip, alpha, recip_new;
  logic [5:0] all_zeros, zeros_new, ratio_zeros;
  logic [40:0] share_low, share_high;
  logic [56:0] share;
  logic [37:0] ratio_low, ratio_high;
  logic [49:0] ratio, ratio_normal;

  normalize #(.W(50)) ratio_norm (
      .clk(clk), .en(1'b1), .value(ratio), .normal(ratio_normal), .zeros(ratio_zeros));

  always_ff @(posedge clk) begin
    mixing <= {mixing[11:0], stats_valid && phase == KEYS};
    if (stats_valid) begin
      mixing_id <= stats_id;
      mixing_last <= stats_last;
      recip_new <= stats_recip;
      zeros_new <= stats_zeros;
    end
    part_sum <= alpha_sum[mixing_id];
    part_all <= total[mixing_id];
    all_zeros <= zeros[mixing_id];
    all_recip <= recip[mixing_id];
    alpha_part <= part_sum > part_all ? part_all : part_sum;  // different truncation can exceed the total
    aligned <= alpha_part << all_zeros;
    share_low <= aligned[31:16] * all_recip;
    share_high <= aligned[47:32] * all_recip;
    share <= {share_high, 16'b0} + {16'b0, share_low};
    alpha <= share[56:31] > 26'h1000000 ? 25'h1000000 : share[55:31];
    if (mixing[6]) rest[mixing_id] <= 25'h1000000 - alpha;
    ratio_low <= alpha[12:0] * recip_new;
    ratio_high <= alpha[24:13] * recip_new;
    ratio <= {ratio_high[36:0], 13'b0} + {12'b0, ratio_low};
    mix_valid <= mixing[11];
    mix_id <= mixing_id;
    mix_mant <= ratio_normal[49:26];
    mix_exp <= 7'(87 - 50) - {1'b0, zeros_new} + {1'b0, ratio_zeros};
    if (rst) mixing <= '0;
  end

  assign mix_done = mix_valid && mixing_last;

  // --- output, and end of each phase

  logic mix_ready, out_en, out_valid, out_last;
  logic [47:0] out;
  logic [24:0] out_rest;
  logic [15:0] out_mean;
  logic [ID_W-1:0] scaled_id;
  logic [X_W-1:0] scaled_at;
  logic scaled_last;

  assign {scaled_last, scaled_id, scaled_at} = scaled_user;
  assign out_ready = phase != VALUES || out_en;

  skid #(.W(90)) outs (
      .clk(clk), .rst(rst), .s_tvalid(scaled_valid && phase == VALUES), .s_tready(out_en),
      .s_tdata({scaled_last, scaled, rest[scaled_id], mean_store[scaled_at[DIM_W-1:0]]}), .m_tvalid(out_valid),
      .m_tready(mix_ready), .m_tdata({out_last, out, out_rest, out_mean}));

  mix_out mix (
      .clk(clk), .rst(rst), .s_tvalid(out_valid), .s_tready(mix_ready), .s_out(out), .s_rest(out_rest),
      .s_mean(out_mean), .s_tlast(out_last), .m_tvalid(m_out_tvalid), .m_tready(m_out_tready),
      .m_tdata(m_out_tdata), .m_tlast(m_out_tlast));

  always_ff @(posedge clk) begin
    stage_done <= phase == SCORE ? stats_valid && stats_last
        : phase == KEYS ? mix_done : phase == VALUES && m_out_tvalid && m_out_tready && m_out_tlast;
    if (rst) stage_done <= 1'b0;
  end
endmodule
