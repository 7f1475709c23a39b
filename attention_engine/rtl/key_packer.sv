`include "check.svh"

// Packs n sequential keys into lines of WAYS keys; the last line can have fewer keys. The sink must always be ready.
module key_packer #(
    parameter int WAYS = 8,
    parameter int KEY_W = 30,
    parameter int N_W = 12
) (
    input  logic                  clk,
    input  logic                  rst,
    input  logic [N_W-1:0]        n,
    input  logic                  s_tvalid,
    input  logic [KEY_W-1:0]      s_tdata,
    output logic                  m_tvalid,
    output logic [WAYS*KEY_W-1:0] m_tdata
);
  localparam int WAY_W = $clog2(WAYS);

  `CHECK(WAYS >= 2 && (1 << WAY_W) == WAYS, "key_packer: WAYS must be a power of two")

  logic [N_W-1:0] count;
  logic last;

  assign last = count == n - 1'b1;

  genvar w;

  generate
    for (w = 0; w < WAYS; w = w + 1) begin : g_way
      always_ff @(posedge clk) if (s_tvalid && count[WAY_W-1:0] == w) m_tdata[w*KEY_W +: KEY_W] <= s_tdata;
    end
  endgenerate

  always_ff @(posedge clk) begin
    m_tvalid <= s_tvalid && (last || count[WAY_W-1:0] == '1);
    if (s_tvalid) begin
      count <= last ? '0 : count + 1'b1;
    end
    if (rst) begin
      count <= '0;
      m_tvalid <= 1'b0;
    end
  end
endmodule
