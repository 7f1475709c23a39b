`include "check.svh"

// floor(num / den), one bit per cycle: NUM_W cycles from s to m. The divisor must not be zero.
module serial_divide #(
    parameter int NUM_W = 48,
    parameter int DEN_W = 24
) (
    input  logic             clk,
    input  logic             rst,
    input  logic             s_tvalid,
    output logic             s_tready,
    input  logic [NUM_W-1:0] s_num,
    input  logic [DEN_W-1:0] s_den,
    output logic             m_tvalid,
    input  logic             m_tready,
    output logic [NUM_W-1:0] m_tdata
);
  localparam int COUNT_W = $clog2(NUM_W + 1);

  `CHECK(NUM_W >= 2 && DEN_W >= 2, "serial_divide: widths must be 2 at least")

  logic [COUNT_W-1:0] left;
  logic [NUM_W-1:0] quotient;  // the numerator shifts out at the top, the quotient enters at the bottom
  logic [DEN_W-1:0] den;
  logic [DEN_W-1:0] rest;
  logic [DEN_W:0] next, less;
  logic busy;

  assign next = {rest, quotient[NUM_W-1]};
  assign less = next - {1'b0, den};
  assign s_tready = !busy;
  assign m_tvalid = busy && left == '0;
  assign m_tdata = quotient;

  always_ff @(posedge clk) begin
    if (s_tvalid && s_tready) begin
      busy <= 1'b1;
      left <= NUM_W[COUNT_W-1:0];
      quotient <= s_num;
      den <= s_den;
      rest <= '0;
    end else if (left != '0) begin
      left <= left - 1'b1;
      quotient <= {quotient[NUM_W-2:0], !less[DEN_W]};
      rest <= less[DEN_W] ? next[DEN_W-1:0] : less[DEN_W-1:0];
    end else if (m_tvalid && m_tready) begin
      busy <= 1'b0;
    end
    if (rst) begin
      busy <= 1'b0;
      left <= '0;
    end
  end
endmodule
