`include "check.svh"

// The NFC filter: only the wanted runs of a page stream pass.
//
// A page has up to RUNS consecutive runs (channels or tokens) of the same length. cfg, once for each page: bitmap of
// the wanted runs, number of values in a run (at least LANES), and an ID for the m_tid of its beats. s: the page, LANES
// values per beat; s_tlast ends it. m: beats with wanted values; m_tkeep marks them, m_tuser is the run of the first
// wanted value, m_end marks the end of a wanted run, m_tlast the end of the last wanted run. A page without wanted runs
// has no output.
module nfc_filter #(
    parameter int LANES = 32,
    parameter int RUNS = 64,
    parameter int RUN_W = 13,
    parameter int TID_W = 16,
    parameter int ID_W = $clog2(RUNS)
) (
    input  logic                clk,
    input  logic                rst,
    input  logic                cfg_tvalid,
    output logic                cfg_tready,
    input  logic [RUNS-1:0]     cfg_wanted,
    input  logic [RUN_W-1:0]    cfg_length,
    input  logic [TID_W-1:0]    cfg_tid,
    input  logic                s_tvalid,
    output logic                s_tready,
    input  logic [16*LANES-1:0] s_tdata,
    input  logic [LANES-1:0]    s_tkeep,
    input  logic                s_tlast,
    output logic                m_tvalid,
    input  logic                m_tready,
    output logic [16*LANES-1:0] m_tdata,
    output logic [LANES-1:0]    m_tkeep,
    output logic [TID_W-1:0]    m_tid,
    output logic [ID_W-1:0]     m_tuser,
    output logic                m_end,
    output logic                m_tlast
);
  `CHECK(RUNS >= 2 && RUNS <= 64 && (RUNS & (RUNS - 1)) == 0, "nfc_filter: RUNS must be 2, 4, 8, 16, 32 or 64")
  `CHECK(LANES >= 2 && (1 << RUN_W) > LANES, "nfc_filter: RUN_W must hold more than LANES")

  logic busy, en, take;
  logic [RUNS-1:0] wanted;       // bit 0: the run of the first value of the beat
  logic [RUN_W-1:0] length, left;  // values of that run from this beat onward
  logic [ID_W-1:0] run;
  logic [TID_W-1:0] tid;
  logic ends, now, then_wanted, any;
  logic [LANES-1:0] own, keep;
  genvar i;

  assign en = m_tready || !m_tvalid;
  assign cfg_tready = !busy || (take && s_tlast);
  assign s_tready = busy && en;
  assign take = s_tvalid && s_tready;
  assign ends = left <= RUN_W'(LANES);
  assign now = wanted[0];
  assign then_wanted = wanted[1];
  assign any = |keep;

  generate
    for (i = 0; i < LANES; i = i + 1) begin : g_lane
      assign own[i] = RUN_W'(i) < left;
      assign keep[i] = s_tkeep[i] && (own[i] ? now : then_wanted);
    end
  endgenerate

  always_ff @(posedge clk) begin
    if (take) begin
      left <= ends ? left + length - RUN_W'(LANES) : left - RUN_W'(LANES);
      if (ends) begin
        wanted <= wanted >> 1;
        run <= run + 1'b1;
      end
      if (s_tlast) busy <= 1'b0;
    end
    if (cfg_tvalid && cfg_tready) begin
      busy <= 1'b1;
      wanted <= cfg_wanted;
      length <= cfg_length;
      left <= cfg_length;
      run <= '0;
      tid <= cfg_tid;
    end
    if (en) begin
      m_tvalid <= take && any;
      m_tdata <= s_tdata;
      m_tkeep <= keep;
      m_tid <= tid;
      m_tuser <= |(keep & own) ? run : run + 1'b1;
      m_end <= ends && now;
      m_tlast <= (ends && now && wanted[RUNS-1:1] == '0) || s_tlast;
    end
    if (rst) begin
      busy <= 1'b0;
      m_tvalid <= 1'b0;
    end
  end
endmodule
