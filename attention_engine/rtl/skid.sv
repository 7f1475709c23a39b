`include "check.svh"

// Skid buffer: a stream register with one more register for the beat that arrives while m holds the first. s_tready
// does not depend on other inputs, so the buffer splits a combinational ready path. Throughput: one beat per cycle;
// latency: one cycle.
module skid #(
    parameter int W = 16
) (
    input  logic         clk,
    input  logic         rst,
    input  logic         s_tvalid,
    output logic         s_tready,
    input  logic [W-1:0] s_tdata,
    output logic         m_tvalid,
    input  logic         m_tready,
    output logic [W-1:0] m_tdata
);
  `CHECK(W >= 1, "skid: W must be 1 at least")

  logic [W-1:0] spare;
  logic full, free;

  assign s_tready = !full;
  assign free = m_tready || !m_tvalid;

  always_ff @(posedge clk) begin
    if (free) begin
      m_tvalid <= full || s_tvalid;
      m_tdata <= full ? spare : s_tdata;
    end
    if (!full) spare <= s_tdata;
    full <= !free && (full || s_tvalid);
    if (rst) begin
      m_tvalid <= 1'b0;
      full <= 1'b0;
    end
  end
endmodule
