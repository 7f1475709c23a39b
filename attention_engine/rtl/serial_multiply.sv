`include "check.svh"

// a x b, unsigned, one bit of b per cycle: B_W cycles from s to m.
module serial_multiply #(
    parameter int A_W = 66,
    parameter int B_W = 33
) (
    input  logic               clk,
    input  logic               rst,
    input  logic               s_tvalid,
    output logic               s_tready,
    input  logic [A_W-1:0]     s_a,
    input  logic [B_W-1:0]     s_b,
    output logic               m_tvalid,
    input  logic               m_tready,
    output logic [A_W+B_W-1:0] m_tdata
);
  localparam int COUNT_W = $clog2(B_W + 1);

  `CHECK(A_W >= 2 && B_W >= 2, "serial_multiply: widths must be 2 at least")

  logic [COUNT_W-1:0] left;
  logic [A_W-1:0] a;
  logic [A_W-1:0] high;
  logic [B_W-1:0] low;  // b shifts out at the bottom, the product enters at the top
  logic [A_W:0] next;
  logic busy;

  assign next = {1'b0, high} + (low[0] ? {1'b0, a} : '0);
  assign s_tready = !busy;
  assign m_tvalid = busy && left == '0;
  assign m_tdata = {high, low};

  always_ff @(posedge clk) begin
    if (s_tvalid && s_tready) begin
      busy <= 1'b1;
      left <= B_W[COUNT_W-1:0];
      a <= s_a;
      low <= s_b;
      high <= '0;
    end else if (left != '0) begin
      left <= left - 1'b1;
      {high, low} <= {next, low[B_W-1:1]};
    end else if (m_tvalid && m_tready) begin
      busy <= 1'b0;
    end
    if (rst) begin
      busy <= 1'b0;
      left <= '0;
    end
  end
endmodule
