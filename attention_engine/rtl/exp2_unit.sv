`include "check.svh"

// 2^x by a table of 256 linear segments; the relative error is below 4e-7.
//
// s_tdata: x, INT_W integer bits (two's complement) and 20 fractional bits. m_tdata: {floor(x), mantissa}; the 24-bit
// mantissa is in [2^23, 2^24) and represents 1 to 2. Throughput: one per cycle; latency: four cycles. s_tuser is passed
// through.
module exp2_unit #(
    parameter int INT_W = 13,
    parameter int USER_W = 1
) (
    input  logic                clk,
    input  logic                rst,
    input  logic                s_tvalid,
    output logic                s_tready,
    input  logic [INT_W+19:0]   s_tdata,
    input  logic [USER_W-1:0]   s_tuser,
    output logic                m_tvalid,
    input  logic                m_tready,
    output logic [INT_W+23:0]   m_tdata,
    output logic [USER_W-1:0]   m_tuser
);
  `include "exp2_table.svh"

  `CHECK(INT_W >= 2 && INT_W <= 16, "exp2_unit: INT_W must be 2 to 16")

  logic en;
  logic [3:0] valid;
  logic [4*USER_W-1:0] user;
  logic [38:0] entry, entry_1;  // {base, slope}
  logic [22:0] base_2;
  logic [11:0] low, low_1;
  logic [27:0] rise;
  logic [INT_W-1:0] whole_0, whole_1, whole_2, whole_3;
  logic [22:0] fraction;

  assign en = m_tready || !m_tvalid;
  assign s_tready = en;
  assign m_tvalid = valid[3];
  assign m_tdata = {whole_3, 1'b1, fraction};
  assign m_tuser = user[3*USER_W +: USER_W];

  always_ff @(posedge clk) begin
    if (en) begin
      valid <= {valid[2:0], s_tvalid};
      user  <= {user[3*USER_W-1:0], s_tuser};
      entry <= exp2_entry(s_tdata[19:12]);
      low <= s_tdata[11:0];
      whole_0 <= s_tdata[INT_W+19:20];
      entry_1 <= entry;  // memory and multiplier exceed one cycle
      low_1 <= low;
      whole_1 <= whole_0;
      rise <= entry_1[15:0] * low_1;
      base_2 <= entry_1[38:16];
      whole_2 <= whole_1;
      fraction <= base_2 + {7'b0, rise[27:12]};
      whole_3 <= whole_2;
    end
    if (rst) valid <= '0;
  end
endmodule
