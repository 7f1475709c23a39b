`include "check.svh"

// Selects the k largest of up to N_MAX keys and outputs a bitmap; ties go to the lowest index. WAYS keys per cycle.
//
// A key is {sign, magnitude}, which sorts like a floating-point number; -0 equals +0. cfg: n is the number of keys, k
// the number of keys to select, always including the `recent` last keys (recent <= k <= n); cfg_abs ignores signs. s:
// WAYS keys per beat; the rest of the last beat is ignored. m: WAYS bits per beat; bits from n on are zero.
//
// The unit determines three digits of the k-th key in sequence: for each digit, it builds a histogram and scans the
// bins. The first histogram is built while keys arrive. After the last key, 3 passes of n / WAYS cycles remain: 2 for
// histograms and 1 for output. Each way has its own bins in two levels, so a scan takes 2 x 2^(DIGIT / 2) cycles.
module argtopk #(
    parameter int N_MAX = 2048,
    parameter int WAYS = 8,
    parameter int DIGIT = 10,
    parameter int KEY_W = 3 * DIGIT,
    parameter int N_W = $clog2(N_MAX + 1)
) (
    input  logic                  clk,
    input  logic                  rst,
    input  logic                  cfg_tvalid,
    output logic                  cfg_tready,
    input  logic [N_W-1:0]        cfg_n,
    input  logic [N_W-1:0]        cfg_k,
    input  logic [N_W-1:0]        cfg_recent,
    input  logic                  cfg_abs,
    input  logic                  s_tvalid,
    output logic                  s_tready,
    input  logic [WAYS*KEY_W-1:0] s_tdata,
    output logic                  m_tvalid,
    input  logic                  m_tready,
    output logic [WAYS-1:0]       m_tdata,
    output logic                  m_tlast
);
  localparam int LINES = N_MAX / WAYS;
  localparam int LINE_W = LINES > 1 ? $clog2(LINES) : 1;
  localparam int WAY_W = $clog2(WAYS);
  localparam int HALF = DIGIT / 2;
  localparam int COARSE = 1 << HALF;
  localparam int COUNT_W = $clog2(LINES + 1);
  localparam int TOTAL_W = COUNT_W + WAY_W;
  localparam int FINE = COARSE + 3;            // start of the scan of the fine bins
  localparam int SCAN_END = FINE + COARSE + 2;
  localparam int SCAN_W = $clog2(SCAN_END + 1);

  `CHECK(WAYS >= 2 && WAYS <= 32 && (1 << WAY_W) == WAYS, "argtopk: WAYS must be 2, 4, 8, 16 or 32")
  `CHECK(N_MAX % WAYS == 0 && N_MAX <= 65536, "argtopk: N_MAX must be a multiple of WAYS, at most 65536")
  `CHECK(DIGIT % 2 == 0 && DIGIT >= 4, "argtopk: DIGIT must be even, 4 at least")

  localparam logic [2:0] IDLE = 3'd0, LOAD = 3'd1, PASS = 3'd2, SETTLE = 3'd3, SCAN = 3'd4, COLLECT = 3'd5, CLEAR = 3'd6;

  logic [2:0] state;
  logic [1:0] digit, digit_1;    // 2: the most significant digit
  logic [N_W-1:0] count, old;    // number of keys, and of competing keys
  logic [N_W-1:0] left;          // keys to select among those equal to the k-th so far
  logic [KEY_W-1:0] kth;         // the known digits of the k-th key
  logic drop_sign;
  logic [LINE_W-1:0] line, last_line;
  logic [SCAN_W-1:0] scan;
  logic [DIGIT-1:0] wipe;
  logic [1:0] settle;
  logic take, line_last, step;

  assign take = s_tvalid && s_tready;
  assign line_last = line == last_line;
  assign step = !m_tvalid || m_tready;
  assign cfg_tready = state == IDLE;
  assign s_tready = state == LOAD;

  // Keys as sortable bits, one line per cycle
  logic [WAYS*KEY_W-1:0] ordered, arrived, fetched, keys;  // keys: memory and following logic take two cycles
  logic [WAYS*KEY_W-1:0] store [0:LINES-1];
  logic [WAYS-1:0] competes, is_recent, competes_1, recent_1, competes_2, recent_2;
  logic counted_1, collect_1, last_1, counted_2, collect_2, last_2;
  genvar w;

  generate
    for (w = 0; w < WAYS; w = w + 1) begin : g_order
      logic [KEY_W-1:0] key;
      logic [N_W:0] index;
      logic negative;
      assign key = s_tdata[w*KEY_W +: KEY_W];
      assign negative = key[KEY_W-1] && !drop_sign && key[KEY_W-2:0] != '0;
      assign ordered[w*KEY_W +: KEY_W] = negative ? ~key : {1'b1, key[KEY_W-2:0]};
      assign index = (N_W+1)'({line, {WAY_W{1'b0}}}) + (N_W+1)'(w);
      assign competes[w] = index < {1'b0, old};
      assign is_recent[w] = !competes[w] && index < {1'b0, count};
    end
  endgenerate

  always_ff @(posedge clk) begin
    if (take) store[line] <= ordered;
    arrived <= ordered;
    if (step) fetched <= store[line];
    counted_1 <= take || state == PASS;
    if (step) begin
      competes_1 <= competes;
      recent_1 <= is_recent;
      collect_1 <= state == COLLECT;
      last_1 <= line_last;
      keys <= digit == 2'd2 ? arrived : fetched;
      {competes_2, recent_2, collect_2, last_2} <= {competes_1, recent_1, collect_1, last_1};
    end
    counted_2 <= counted_1;
    if (rst) begin
      {counted_1, counted_2} <= 2'b00;
      {collect_1, collect_2} <= 2'b00;
    end
  end

  // Bins: a count and its digit; a count of another digit is stale and is read as zero
  logic [HALF-1:0] low_bin, high_bin;
  logic [WAYS*COUNT_W-1:0] coarse_counts, fine_counts;
  logic wipe_coarse;

  assign low_bin = ~scan_low;  // descending in both levels
  assign wipe_coarse = state == CLEAR || (state == SCAN && scan >= FINE);

  generate
    for (w = 0; w < WAYS; w = w + 1) begin : g_bins
      logic [KEY_W-1:0] key;
      logic [DIGIT-1:0] bin, bin_2, bin_3, bin_4;
      logic [COUNT_W+1:0] fine [0:(1<<DIGIT)-1];
      logic [COUNT_W-1:0] coarse [0:COARSE-1];
      logic [COUNT_W+1:0] read;
      logic [COUNT_W-1:0] fresh, more, more_4, more_5, big;
      logic hit, hit_2, hit_3, hit_4, same_4, same_5;  // same: as the previous key and the one before it

      assign key = keys[w*KEY_W +: KEY_W];
      assign bin = digit == 2'd2 ? key[2*DIGIT +: DIGIT] : digit == 2'd1 ? key[DIGIT +: DIGIT] : key[0 +: DIGIT];
      assign hit = counted_2 && competes_2[w]
          && (digit == 2'd2 || key[2*DIGIT +: DIGIT] == kth[2*DIGIT +: DIGIT])
          && (digit != 2'd0 || key[DIGIT +: DIGIT] == kth[DIGIT +: DIGIT]);
      assign fresh = read[COUNT_W +: 2] == digit + 2'd1 ? read[COUNT_W-1:0] : '0;
      assign more = (same_4 ? more_4 : same_5 ? more_5 : fine_counts[w*COUNT_W +: COUNT_W]) + 1'b1;
      assign big = coarse[state == SCAN ? low_bin : bin_2[DIGIT-1:HALF]];

      always_ff @(posedge clk) begin
        read <= fine[state == SCAN ? {high_bin, low_bin} : bin];
        hit_2 <= hit;
        bin_2 <= bin;
        hit_3 <= hit_2;
        bin_3 <= bin_2;
        hit_4 <= hit_3;
        bin_4 <= bin_3;
        same_4 <= hit_3 && bin_3 == bin_2;
        same_5 <= hit_4 && bin_4 == bin_2;
        more_4 <= more;
        more_5 <= more_4;
        coarse_counts[w*COUNT_W +: COUNT_W] <= big;
        fine_counts[w*COUNT_W +: COUNT_W] <= fresh;
        if (hit_3 || state == COLLECT || state == CLEAR)
          fine[hit_3 ? bin_3 : wipe] <= hit_3 ? {digit + 2'd1, more} : {(COUNT_W+2){1'b0}};
        if (hit_2 || wipe_coarse)
          coarse[hit_2 ? bin_2[DIGIT-1:HALF] : state == CLEAR ? wipe[HALF-1:0] : scan_low] <= hit_2 ? big + 1'b1 : '0;
        if (rst) {hit_2, hit_3, hit_4} <= 3'b000;
      end
    end
  endgenerate

  // A scan descends: it finds the coarse bin and then the fine bin of the k-th key
  logic [HALF-1:0] scan_low, bin_1, bin_2, bin_3;
  logic [TOTAL_W-1:0] total, total_1;
  logic coarse_1, fine_1, fine_2, valid_3, fine_3, enough, settled, settled_fine, found;
  logic [HALF-1:0] bin_4;
  logic [WAYS*COUNT_W-1:0] counts;
  integer i;

  assign counts = fine_2 ? fine_counts : coarse_counts;

  always_comb begin
    total = '0;
    for (i = 0; i < WAYS; i = i + 1) total = total + TOTAL_W'(counts[i*COUNT_W +: COUNT_W]);
  end

  always_ff @(posedge clk) begin
    scan_low <= state != SCAN || scan == FINE - 1 ? '0 : scan_low + 1'b1;
    coarse_1 <= state == SCAN && scan < COARSE;
    fine_1 <= state == SCAN && scan >= FINE && scan < FINE + COARSE;  // fine bins are available one cycle later
    fine_2 <= fine_1;
    bin_1 <= low_bin;
    bin_2 <= bin_1;
    valid_3 <= fine_2 || coarse_1;
    fine_3 <= fine_2;
    bin_3 <= fine_2 ? bin_2 : bin_1;
    total_1 <= total;
    settled <= state == SCAN && valid_3 && !found && enough;
    settled_fine <= fine_3;
    bin_4 <= bin_3;
    if (settled && !settled_fine) high_bin <= bin_4;
    digit_1 <= digit;
  end

  assign enough = N_W'(total_1) >= left;

  generate
    for (w = 0; w < 3; w = w + 1) begin : g_kth
      always_ff @(posedge clk)
        if (settled && settled_fine && digit_1 == w) kth[w*DIGIT +: DIGIT] <= {high_bin, bin_4};
    end
  endgenerate

  // Selected: all keys above the k-th key, the first keys equal to it, and the recent keys
  logic [WAYS-1:0] equal, surely, equal_1, surely_1, chosen;
  logic collect_3, last_3, collect_4, last_4;
  logic [(WAYS+1)*(WAY_W+1)-1:0] ranks, ranks_1;  // equal keys in the line before each way, and in total
  logic [WAY_W:0] rank, few, taken;               // few: number of equal keys of a line to select
  integer j;

  assign few = left[N_W-1:WAY_W] != '0 ? (WAY_W+1)'(WAYS) : {1'b0, left[WAY_W-1:0]};
  assign rank = ranks_1[WAYS*(WAY_W+1) +: WAY_W+1];
  assign taken = rank < few ? rank : few;

  always_comb begin
    ranks = '0;
    for (j = 0; j < WAYS; j = j + 1) begin
      chosen[j] = surely_1[j] || (equal_1[j] && ranks_1[j*(WAY_W+1) +: WAY_W+1] < few);
      ranks[(j+1)*(WAY_W+1) +: WAY_W+1] = ranks[j*(WAY_W+1) +: WAY_W+1] + {{WAY_W{1'b0}}, equal[j]};
    end
  end

  generate
    for (w = 0; w < WAYS; w = w + 1) begin : g_compare
      always_ff @(posedge clk) begin
        if (step) begin
          equal[w] <= competes_2[w] && keys[w*KEY_W +: KEY_W] == kth;
          surely[w] <= (competes_2[w] && keys[w*KEY_W +: KEY_W] > kth) || recent_2[w];
        end
      end
    end
  endgenerate

  always_ff @(posedge clk) begin
    case (state)
      IDLE:
        if (cfg_tvalid) begin
          state <= LOAD;
          digit <= 2'd2;
          line <= '0;
          last_line <= LINE_W'((cfg_n - 1'b1) >> WAY_W);
          count <= cfg_n;
          old <= cfg_n - cfg_recent;
          left <= cfg_k - cfg_recent;
          drop_sign <= cfg_abs;
        end
      LOAD, PASS:
        if (take || state == PASS) begin
          line <= line_last ? '0 : line + 1'b1;
          settle <= 2'd0;
          if (line_last) state <= SETTLE;
        end
      SETTLE: begin  // waits for the writes of the last counts
        settle <= settle + 1'b1;
        scan <= '0;
        found <= 1'b0;
        if (settle == 2'd3) state <= SCAN;
      end
      SCAN: begin
        scan <= scan + 1'b1;
        if (scan == FINE - 1) found <= 1'b0;
        else if (valid_3 && !found) begin
          if (enough) found <= 1'b1;
          else left <= left - N_W'(total_1);
        end
        if (scan == SCAN_END) begin
          state <= digit == 2'd0 ? COLLECT : PASS;
          digit <= digit == 2'd0 ? 2'd0 : digit - 1'b1;
          wipe <= '0;
        end
      end
      COLLECT: begin
        wipe <= wipe == '1 ? wipe : wipe + 1'b1;
        if (step) begin
          line <= line + 1'b1;
          if (line_last) state <= CLEAR;
        end
      end
      CLEAR:
        if (wipe != '1) wipe <= wipe + 1'b1;
        else if (!collect_1 && !collect_2 && !collect_3 && !collect_4 && step) state <= IDLE;
      default: state <= CLEAR;
    endcase
    if (step) begin
      {collect_3, last_3} <= {collect_2, last_2};
      {collect_4, last_4} <= {collect_3, last_3};
      {equal_1, surely_1, ranks_1} <= {equal, surely, ranks};
      m_tvalid <= collect_4;
      m_tdata <= chosen;
      m_tlast <= last_4;
      if (collect_4) left <= left - N_W'(taken);
    end
    if (rst) begin
      state <= CLEAR;
      wipe <= '0;
      m_tvalid <= 1'b0;
      {collect_3, collect_4} <= 2'b00;
    end
  end
endmodule
