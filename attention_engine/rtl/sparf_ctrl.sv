`include "check.svh"

// Registers of the engine, its phases, and the walk over pages.
//
// AXI-Lite, 32-bit registers: 0x00 control (bit 0: start), 0x04 status (0 busy, 1 done, 2 invalid parameters, 8 NaN or
// infinity in the input, 9 saturation of a score or an output; start clears them), 0x08 r, 0x0C k, 0x10 l, 0x14 m, 0x18
// n, 0x1C S, 0x20 cycles of the last run, 0x24 {Q_HEADS, DIM}. 0x40 + 16 x query: m and l (two words, 32 fractional
// bits) of the attended tokens of the last run, with the sum of 2^x equal to l x 2^m. Invalid parameters are rejected
// at start.
//
// The unit stores the bitmap of argtopk, first for channels, then for tokens. Each phase that reads flash walks over
// the bitmap bit by bit. It requests each page with a wanted bit and announces it to the filter, in order.
module sparf_ctrl #(
    parameter int DIM = 128,
    parameter int Q_HEADS = 1,
    parameter int N_MAX = 2048,
    parameter int PAGE_VALUES = 2048,
    parameter int WAYS = 8,
    parameter int N_W = $clog2(N_MAX + 1),
    parameter int RUN_W = $clog2(PAGE_VALUES + 1),
    parameter int ID_W = Q_HEADS > 1 ? $clog2(Q_HEADS) : 1
) (
    input  logic             clk,
    input  logic             rst,
    input  logic             s_axil_awvalid,
    output logic             s_axil_awready,
    input  logic [7:0]       s_axil_awaddr,
    input  logic             s_axil_wvalid,
    output logic             s_axil_wready,
    input  logic [31:0]      s_axil_wdata,
    output logic             s_axil_bvalid,
    input  logic             s_axil_bready,
    output logic [1:0]       s_axil_bresp,
    input  logic             s_axil_arvalid,
    output logic             s_axil_arready,
    input  logic [7:0]       s_axil_araddr,
    output logic             s_axil_rvalid,
    input  logic             s_axil_rready,
    output logic [31:0]      s_axil_rdata,
    output logic [1:0]       s_axil_rresp,
    // run parameters
    output logic [2:0]       phase,
    output logic             phase_begins,
    output logic [N_W-1:0]   r,
    output logic [N_W-1:0]   k,
    output logic [N_W-1:0]   seq_len,
    output logic [1:0]       m_log,
    // run results
    input  logic             stage_done,
    input  logic             bad,
    input  logic             over,
    // m and l of a query
    input  logic             row_valid,
    input  logic [ID_W-1:0]  row_id,
    input  logic [12:0]      row_max,
    input  logic [47:0]      row_sum,
    // argtopk
    output logic             topk_tvalid,
    input  logic             topk_tready,
    output logic [N_W-1:0]   topk_n,
    output logic [N_W-1:0]   topk_k,
    output logic [N_W-1:0]   topk_recent,
    output logic             topk_abs,
    input  logic             s_mask_tvalid,
    input  logic [WAYS-1:0]  s_mask_tdata,
    input  logic             s_mask_tlast,
    // pages: {kind, group of tokens, page of channels}, and the runs that pass the filter
    output logic             m_req_tvalid,
    input  logic             m_req_tready,
    output logic [33:0]      m_req_tdata,
    output logic             m_page_tvalid,
    input  logic             m_page_tready,
    output logic [63:0]      m_page_wanted,
    output logic [RUN_W-1:0] m_page_length,
    output logic [15:0]      m_page_tid
);
  localparam logic [2:0] IDLE = 3'd0, CHANNELS = 3'd1, SCORE = 3'd2, WEIGH = 3'd3, KEYS = 3'd4, VALUES = 3'd5;
  localparam int LINES = N_MAX / WAYS;
  localparam int LINE_W = LINES > 1 ? $clog2(LINES) : 1;
  localparam int WAY_W = $clog2(WAYS);
  localparam int PAGE_LOG = $clog2(PAGE_VALUES);

  `CHECK(N_MAX >= DIM && N_MAX <= 32768 && N_MAX % WAYS == 0, "sparf_ctrl: N_MAX must be DIM to 32768")
  `CHECK((1 << PAGE_LOG) == PAGE_VALUES && PAGE_VALUES >= 8 * 8, "sparf_ctrl: PAGE_VALUES must be a power of two")
  `CHECK(DIM % 8 == 0, "sparf_ctrl: DIM must be a multiple of 8")
  `CHECK(Q_HEADS >= 1 && Q_HEADS <= 8, "sparf_ctrl: Q_HEADS must be 1 to 8")

  // Registers
  logic [31:0] reg_r, reg_k, reg_l, reg_m, reg_n, reg_s, cycles;
  logic done, refused, saw_bad, saw_over, write, start, legal, possible;

  assign s_axil_awready = !s_axil_bvalid && s_axil_awvalid && s_axil_wvalid;
  assign s_axil_wready = s_axil_awready;
  assign write = s_axil_awready;
  assign s_axil_arready = !s_axil_rvalid;
  assign s_axil_bresp = 2'b00;
  assign s_axil_rresp = 2'b00;
  assign start = write && s_axil_awaddr[7:2] == 6'd0 && s_axil_wdata[0] && phase == IDLE;
  assign possible = reg_r >= 1 && reg_r <= DIM && reg_s >= 1 && reg_s <= N_MAX && reg_k >= 1 && reg_k <= reg_s
      && reg_l <= reg_k && (reg_m == 1 || reg_m == 2 || reg_m == 4 || reg_m == 8) && reg_n >= 1 && reg_n <= 64
      && reg_n[6:0] * DIM <= PAGE_VALUES;

  // m and l: four words per query, the last one zero
  logic [8*128-1:0] row_words;
  logic [3:0] read_row;
  genvar i;

  assign read_row = s_axil_araddr[7:4] - 4'd4;

  generate
    for (i = 0; i < 8; i = i + 1) begin : g_row
      if (i < Q_HEADS) begin : g_held
        logic [12:0] top;
        logic [47:0] sum;
        assign row_words[128*i +: 128] = {48'b0, sum, {19{top[12]}}, top};
        always_ff @(posedge clk) begin
          if (row_valid && row_id == ID_W'(i)) {top, sum} <= {row_max, row_sum};
          if (rst) {top, sum} <= '0;
        end
      end else begin : g_none
        assign row_words[128*i +: 128] = '0;
      end
    end
  endgenerate

  always_ff @(posedge clk) begin
    if (write) begin
      s_axil_bvalid <= 1'b1;
      case (s_axil_awaddr[7:2])
        6'd2: reg_r <= s_axil_wdata;
        6'd3: reg_k <= s_axil_wdata;
        6'd4: reg_l <= s_axil_wdata;
        6'd5: reg_m <= s_axil_wdata;
        6'd6: reg_n <= s_axil_wdata;
        6'd7: reg_s <= s_axil_wdata;
        default: ;
      endcase
    end else if (s_axil_bready) s_axil_bvalid <= 1'b0;
    if (s_axil_arvalid && s_axil_arready) begin
      s_axil_rvalid <= 1'b1;
      case (s_axil_araddr[7:2])
        6'd1: s_axil_rdata <= {22'b0, saw_over, saw_bad, 5'b0, refused, done, phase != IDLE};
        6'd2: s_axil_rdata <= reg_r;
        6'd3: s_axil_rdata <= reg_k;
        6'd4: s_axil_rdata <= reg_l;
        6'd5: s_axil_rdata <= reg_m;
        6'd6: s_axil_rdata <= reg_n;
        6'd7: s_axil_rdata <= reg_s;
        6'd8: s_axil_rdata <= cycles;
        6'd9: s_axil_rdata <= {16'(Q_HEADS), 16'(DIM)};
        default: s_axil_rdata <= read_row < 4'(Q_HEADS) ? row_words[32*{read_row[2:0], s_axil_araddr[3:2]} +: 32] : '0;
      endcase
    end else if (s_axil_rready) s_axil_rvalid <= 1'b0;
    legal <= possible;
    if (rst) begin
      s_axil_bvalid <= 1'b0;
      s_axil_rvalid <= 1'b0;
      {reg_r, reg_k, reg_l, reg_m, reg_n, reg_s} <= '0;
    end
  end

  // Phases
  logic [N_W-1:0] l;
  logic [6:0] n;
  logic next, mask_done;

  assign mask_done = s_mask_tvalid && s_mask_tlast;
  assign next = phase == CHANNELS || phase == WEIGH ? mask_done : phase != IDLE && stage_done;
  assign topk_n = phase == CHANNELS ? N_W'(DIM) : seq_len;
  assign topk_k = phase == CHANNELS ? r : k;
  assign topk_recent = phase == CHANNELS ? '0 : l;
  assign topk_abs = phase == CHANNELS;

  always_ff @(posedge clk) begin
    phase_begins <= 1'b0;
    if (start) begin
      done <= 1'b0;
      refused <= !legal;
      if (legal) begin
        phase <= CHANNELS;
        phase_begins <= 1'b1;
        {saw_bad, saw_over} <= 2'b00;
        cycles <= '0;
        r <= reg_r[N_W-1:0];
        k <= reg_k[N_W-1:0];
        l <= reg_l[N_W-1:0];
        n <= reg_n[6:0];
        seq_len <= reg_s[N_W-1:0];
        m_log <= reg_m[3] ? 2'd3 : reg_m[2] ? 2'd2 : {1'b0, reg_m[1]};
      end
    end else if (next) begin
      phase <= phase == VALUES ? IDLE : phase + 1'b1;
      phase_begins <= phase != VALUES;
      if (phase == VALUES) done <= 1'b1;
    end
    if (phase != IDLE) begin
      cycles <= cycles + 1'b1;
      if (bad) saw_bad <= 1'b1;
      if (over) saw_over <= 1'b1;
    end
    if (phase_begins && (phase == CHANNELS || phase == WEIGH)) topk_tvalid <= 1'b1;
    else if (topk_tready) topk_tvalid <= 1'b0;
    if (rst) begin
      phase <= IDLE;
      {done, refused, saw_bad, saw_over, topk_tvalid} <= '0;
      cycles <= '0;
    end
  end

  // The bitmap, and the walk over it: `unit` is a channel or a token
  logic [WAYS-1:0] store [0:LINES-1];
  logic [WAYS-1:0] bits;
  logic [LINE_W-1:0] line;
  logic [N_W-1:0] unit, unit_next, unit_last;
  logic [15:0] page, group, group_in, groups, first;
  logic [6:0] in_page, page_units;
  logic [63:0] wanted, wanted_now;
  logic walking, step, page_ends, all_ends, bit_now, any, any_now;
  logic step_1, bit_1, ends_1, all_1;  // second cycle of a step, with its bit
  logic [6:0] in_page_1;

  // A short queue of pages between the walk and its receivers
  logic [1:0] count;
  logic [63:0] queue_wanted [0:1];
  logic [33:0] queue_req [0:1];
  logic [15:0] queue_first [0:1];
  logic head, tail, put, req_done, page_done, take;

  assign page_units = phase == SCORE ? 7'd1 << m_log : n;
  assign bit_now = bits[unit[WAY_W-1:0]];
  assign wanted_now = wanted | ({63'b0, bit_1} << in_page_1[5:0]);
  assign all_ends = unit == unit_last;
  assign page_ends = in_page == page_units - 1'b1 || all_ends;
  assign step = walking && count != 2'd2 && !(count == 2'd1 && step_1 && ends_1);
  assign any_now = any || bit_1;
  assign put = step_1 && ends_1 && any_now;
  assign unit_next = !walking || (step && all_ends) ? '0 : step ? unit + 1'b1 : unit;
  assign take = count != 0 && (req_done || m_req_tready) && (page_done || m_page_tready);
  assign m_req_tvalid = count != 0 && !req_done;
  assign m_req_tdata = queue_req[head];
  assign m_page_tvalid = count != 0 && !page_done;
  assign m_page_wanted = queue_wanted[head];
  assign m_page_tid = queue_first[head];
  assign m_page_length = phase == SCORE ? RUN_W'(PAGE_VALUES) >> m_log : RUN_W'(DIM);

  always_ff @(posedge clk) begin
    if (s_mask_tvalid) begin
      store[line] <= s_mask_tdata;
      line <= s_mask_tlast ? '0 : line + 1'b1;
    end
    bits <= store[LINE_W'(unit_next >> WAY_W)];
    unit <= unit_next;
    unit_last <= (phase == SCORE ? N_W'(DIM) : seq_len) - 1'b1;  // ready before the walk starts
    if (phase_begins && (phase == SCORE || phase == KEYS || phase == VALUES)) begin
      walking <= 1'b1;
      {page, group, group_in, first, in_page} <= '0;
      wanted <= '0;
      any <= 1'b0;
      groups <= 16'((32'(seq_len) - 1) >> (PAGE_LOG - 32'(m_log)));
    end else begin
      if (step) in_page <= page_ends ? '0 : in_page + 1'b1;
      if (step && all_ends && (phase != SCORE || group_in == groups)) walking <= 1'b0;
      if (step && all_ends) group_in <= group_in + 1'b1;
      if (step_1) begin
        wanted <= ends_1 ? '0 : wanted_now;
        any <= !ends_1 && any_now;
        if (ends_1) begin
          page <= page + 1'b1;
          first <= first + 16'(page_units);
        end
        if (all_1) begin
          {page, first} <= '0;
          group <= group + 1'b1;
        end
      end
    end
    step_1 <= step;
    {bit_1, ends_1, all_1, in_page_1} <= {bit_now, page_ends, all_ends, in_page};
    if (put) begin
      queue_wanted[tail] <= wanted_now;
      queue_req[tail] <= phase == SCORE ? {2'd0, group, page} : {phase == KEYS ? 2'd1 : 2'd2, page, 16'd0};
      queue_first[tail] <= first;
      tail <= !tail;
    end
    count <= count + {1'b0, put} - {1'b0, take};
    if (take) begin
      head <= !head;
      {req_done, page_done} <= 2'b00;
    end else begin
      if (m_req_tvalid && m_req_tready) req_done <= 1'b1;
      if (m_page_tvalid && m_page_tready) page_done <= 1'b1;
    end
    if (rst || next) {walking, step_1} <= 2'b00;
    if (rst) begin
      line <= '0;
      unit <= '0;
      {count, head, tail, req_done, page_done} <= '0;
    end
  end
endmodule
