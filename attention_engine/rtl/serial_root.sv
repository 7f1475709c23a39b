`include "check.svh"

// floor(sqrt(x)), one bit per cycle: W / 2 cycles from s to m.
module serial_root #(
    parameter int W = 64
) (
    input  logic           clk,
    input  logic           rst,
    input  logic           s_tvalid,
    output logic           s_tready,
    input  logic [W-1:0]   s_tdata,
    output logic           m_tvalid,
    input  logic           m_tready,
    output logic [W/2-1:0] m_tdata
);
  localparam int H = W / 2;
  localparam int COUNT_W = $clog2(H + 1);

  `CHECK(W % 2 == 0 && W >= 4, "serial_root: W must be even, 4 at least")

  logic [COUNT_W-1:0] left;
  logic [W-1:0] x;
  logic [H-1:0] root;
  logic [H+1:0] rest, next, less;
  logic busy;

  assign next = {rest[H-1:0], x[W-1:W-2]};
  assign less = next - {root, 2'b01};
  assign s_tready = !busy;
  assign m_tvalid = busy && left == '0;
  assign m_tdata = root;

  always_ff @(posedge clk) begin
    if (s_tvalid && s_tready) begin
      busy <= 1'b1;
      left <= H[COUNT_W-1:0];
      x <= s_tdata;
      root <= '0;
      rest <= '0;
    end else if (left != '0) begin
      left <= left - 1'b1;
      x <= x << 2;
      root <= {root[H-2:0], next >= {root, 2'b01}};
      rest <= next >= {root, 2'b01} ? less : next;
    end else if (m_tvalid && m_tready) begin
      busy <= 1'b0;
    end
    if (rst) begin
      busy <= 1'b0;
      left <= '0;
    end
  end
endmodule
