`include "check.svh"

// Exact weighted sums of rows: sums[q][i] += weight[q] x row[i] for Q_HEADS queries, in units of 2^-48.
//
// s_w: one weight for each query and row, (-1)^sign x sig x 2^(shift - 24), as {sign, shift, sig}. s_row: rows of up to
// RUN_MAX values, LANES per beat, Q_HEADS cycles per beat; s_row_tuser: the row starts new sums; s_row_tdest: one of
// two banks of sums; s_row_tkeep: values to check for NaN or infinity. s_drain: {bank, beats - 1} of the sums to output
// after all previous rows. m: one sum per beat, query by query, with the query in m_tid and NaN or infinity in m_tuser;
// m_tlast at the end. One bank can fill while the other drains; a drain blocks rows for six of LANES cycles. The
// feedback of a sum takes at least four cycles, so rows with fewer beats x queries wait.
module gemv_av #(
    parameter int RUN_MAX = 512,
    parameter int Q_HEADS = 1,
    parameter int LANES = 32,
    parameter int SIG_W = 16,
    parameter int ACC_W = 88,
    parameter int ID_W = Q_HEADS > 1 ? $clog2(Q_HEADS) : 1,
    parameter int POS_W = RUN_MAX > LANES ? $clog2(RUN_MAX / LANES) : 1
) (
    input  logic                clk,
    input  logic                rst,
    input  logic                s_w_tvalid,
    output logic                s_w_tready,
    input  logic [SIG_W+5:0]    s_w_tdata,
    input  logic                s_row_tvalid,
    output logic                s_row_tready,
    input  logic [16*LANES-1:0] s_row_tdata,
    input  logic [LANES-1:0]    s_row_tkeep,
    input  logic                s_row_tuser,
    input  logic                s_row_tdest,
    input  logic                s_row_tlast,
    input  logic                s_drain_tvalid,
    output logic                s_drain_tready,
    input  logic [POS_W:0]      s_drain_tdata,
    output logic                m_tvalid,
    input  logic                m_tready,
    output logic [ACC_W-1:0]    m_tdata,
    output logic [ID_W-1:0]     m_tid,
    output logic                m_tuser,
    output logic                m_tlast
);
  localparam int HEAD_W = Q_HEADS > 1 ? $clog2(Q_HEADS) : 0;
  localparam int ADDR_W = 1 + POS_W + HEAD_W;
  localparam int LANE_W = $clog2(LANES);
  localparam int STAGES = 6;  // issue, four in fp16_product, sum

  `CHECK(RUN_MAX % LANES == 0, "gemv_av: RUN_MAX must be a multiple of LANES")
  `CHECK((1 << LANE_W) == LANES, "gemv_av: LANES must be a power of two")
  `CHECK(Q_HEADS >= 1 && Q_HEADS <= 16, "gemv_av: Q_HEADS must be 1 to 16")

  // Row input: one (beat, query) per cycle
  logic [POS_W-1:0] pos;
  logic [ID_W-1:0] head;
  logic issue, want, fetch, pending, head_last;
  logic [SIG_W+5:0] held [0:Q_HEADS-1];
  logic [SIG_W+5:0] weight;
  logic [ADDR_W-1:0] addr, fetch_addr;

  assign head_last = head == ID_W'(Q_HEADS - 1);
  assign weight = pos == '0 ? s_w_tdata : held[head];
  assign issue = s_row_tvalid && (pos != '0 || s_w_tvalid) && cool == '0 && !want && !pending;
  // After a short row, a sum is not written before its next product is due; the drain needs the memory port
  logic [1:0] short;  // missing cycles of this row, of four
  logic [1:0] cool;

  assign s_row_tready = issue && head_last;
  assign s_w_tready = issue && pos == '0;

  always_ff @(posedge clk) begin
    if (issue) begin
      held[head] <= weight;
      head <= head_last ? '0 : head + 1'b1;
      if (head_last) pos <= s_row_tlast ? '0 : pos + 1'b1;
      if (short != '0) short <= short - 1'b1;
    end
    if (cool != '0) cool <= cool - 1'b1;
    if (s_row_tready && s_row_tlast) begin
      cool <= short;
      short <= 2'd3;
    end
    if (rst) begin
      head <= '0;
      pos  <= '0;
      cool <= '0;
      short <= 2'd3;
    end
  end

  // Sums: read during the multiplication, added when both operands are ready, written in the next cycle
  logic [STAGES-1:0] valid;
  logic [2:0] first;
  logic [STAGES*ADDR_W-1:0] addrs;
  logic [LANES*ACC_W-1:0] product, read, read_1, sum;  // memory and adder take two cycles
  logic [16*LANES-1:0] row_0;
  logic [SIG_W+5:0] weight_0;
  logic [5*LANES-1:0] keeps;
  logic [LANES-1:0] lane_bad, minus;
  (* ram_style = "block" *) logic [LANES*ACC_W:0] store [0:(1<<ADDR_W)-1];
  logic read_bad, read_bad_1, sum_bad;

  generate
    if (HEAD_W == 0) begin : g_one
      assign addr = {s_row_tdest, pos};
    end else begin : g_many
      assign addr = {s_row_tdest, pos, head};
    end
  endgenerate

  genvar i;
  generate
    for (i = 0; i < LANES; i = i + 1) begin : g_lane
      logic [ACC_W:0] total;
      fp16_product #(.SIG_W(SIG_W), .ACC_W(ACC_W)) lane (
          .clk(clk), .en(1'b1), .a_sign(weight_0[SIG_W+5]), .a_sig(weight_0[SIG_W-1:0]),
          .a_shift(weight_0[SIG_W+4:SIG_W]), .b(row_0[16*i +: 16]), .ones(product[i*ACC_W +: ACC_W]), .minus(minus[i]), .bad(lane_bad[i]));
      assign total = {read_1[i*ACC_W +: ACC_W], 1'b1} + {product[i*ACC_W +: ACC_W], minus[i]};
      always_ff @(posedge clk) sum[i*ACC_W +: ACC_W] <= total[ACC_W:1];
    end
  endgenerate

  always_ff @(posedge clk) begin
    valid <= {valid[STAGES-2:0], issue};
    first <= {first[1:0], s_row_tuser};
    addrs <= {addrs[(STAGES-1)*ADDR_W-1:0], addr};
    keeps <= {keeps[4*LANES-1:0], s_row_tkeep};
    row_0 <= s_row_tdata;
    weight_0 <= weight;
    if (valid[2] || fetch) begin
      if (valid[2] && first[2]) {read_bad, read} <= '0;
      else {read_bad, read} <= store[valid[2] ? addrs[2*ADDR_W +: ADDR_W] : fetch_addr];
    end
    {read_bad_1, read_1} <= {read_bad, read};
    sum_bad <= read_bad_1 || |(lane_bad & keeps[4*LANES +: LANES]);
    if (valid[5]) store[addrs[5*ADDR_W +: ADDR_W]] <= {sum_bad, sum};
    if (rst) valid <= '0;
  end

  // Drain: words of LANES sums, output one at a time
  logic draining, word_bad, more;
  logic bank;
  logic [POS_W-1:0] beats, from;
  logic [ID_W-1:0] from_head, out_head;
  logic [LANE_W:0] left;
  logic [LANE_W-1:0] lane;
  logic [LANES*ACC_W-1:0] word;
  logic arrived, load, busy_bank, word_last;
  logic [STAGES-1:0] in_bank;

  generate
    for (i = 0; i < STAGES; i = i + 1) begin : g_bank
      assign in_bank[i] = valid[i] && addrs[(i+1)*ADDR_W-1] == bank;
    end
    if (HEAD_W == 0) begin : g_fetch_one
      assign fetch_addr = {bank, from};
    end else begin : g_fetch_many
      assign fetch_addr = {bank, from, from_head};
    end
  endgenerate

  assign busy_bank = |in_bank;
  assign s_drain_tready = !draining;
  assign want = draining && more && !pending && left <= 4;
  assign fetch = want && !busy_bank && valid[2:0] == '0;
  assign load = arrived && (left == 0 || (left == 1 && m_tready));
  assign m_tvalid = left != 0;
  assign m_tdata = word[lane*ACC_W +: ACC_W];
  assign lane = ~left[LANE_W-1:0] + 1'b1;
  assign m_tid = out_head;
  assign m_tuser = word_bad;
  assign m_tlast = left == 1 && word_last;

  always_ff @(posedge clk) begin
    if (s_drain_tvalid && s_drain_tready) begin
      draining <= 1'b1;
      {bank, beats} <= s_drain_tdata;
      from <= '0;
      from_head <= '0;
      more <= 1'b1;
    end
    if (fetch) pending <= 1'b1;
    arrived <= pending && !load;
    if (m_tvalid && m_tready) begin
      left <= left - 1'b1;
      if (m_tlast) draining <= 1'b0;
    end
    if (load) begin
      pending <= 1'b0;
      left <= LANES[LANE_W:0];
      word <= read_1;
      word_bad <= read_bad_1;
      out_head <= from_head;
      word_last <= from == beats && from_head == ID_W'(Q_HEADS - 1);
      from <= from + 1'b1;
      if (from == beats) begin
        from <= '0;
        from_head <= from_head + 1'b1;
        more <= from_head != ID_W'(Q_HEADS - 1);
      end
    end
    if (rst) begin
      draining <= 1'b0;
      pending  <= 1'b0;
      arrived  <= 1'b0;
      more     <= 1'b0;
      left     <= '0;
    end
  end
endmodule
