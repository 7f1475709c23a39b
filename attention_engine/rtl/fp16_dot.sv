`include "check.svh"

// Exact dot products of FP16 vectors, LANES values per cycle, in units of 2^-48.
//
// A beat has LANES values of a, then LANES values of b. s_tuser starts a vector and s_tlast ends it; s_tid selects one
// of CONTEXTS sums, so that beats of different vectors can alternate. m_tuser: an input is NaN or infinite; such inputs
// are zero. Sums are integers, so the order of beats and lanes has no effect on the result.
module fp16_dot #(
    parameter int LANES = 16,
    parameter int CONTEXTS = 1,
    parameter int ACC_W = 88,
    parameter int ID_W = CONTEXTS > 1 ? $clog2(CONTEXTS) : 1
) (
    input  logic                clk,
    input  logic                rst,
    input  logic                s_tvalid,
    output logic                s_tready,
    input  logic [32*LANES-1:0] s_tdata,
    input  logic [ID_W-1:0]     s_tid,
    input  logic                s_tuser,
    input  logic                s_tlast,
    output logic                m_tvalid,
    input  logic                m_tready,
    output logic [ACC_W-1:0]    m_tdata,
    output logic [ID_W-1:0]     m_tid,
    output logic                m_tuser
);
  `include "fp16.svh"

  localparam int LEVELS = $clog2(LANES);
  localparam int DEPTH = 4 + LEVELS;  // products, then one tree level per cycle

  `CHECK(LANES >= 8 && LANES <= 128 && (1 << LEVELS) == LANES, "fp16_dot: LANES must be 8, 16, 32, 64 or 128")
  `CHECK(CONTEXTS >= 1 && CONTEXTS <= 16, "fp16_dot: CONTEXTS must be 1 to 16")

  // Node i adds nodes 2i and 2i + 1; the lanes are nodes LANES to 2 LANES - 1. A negative lane needs an extra one
  // (see fp16_product): each node adds it for its left child, and the last sum adds the rest.
  logic [2*LANES*ACC_W-1:0] node;
  logic [2*LANES-1:1] bad, owes;
  logic en;

  assign en = m_tready || !m_tvalid;
  assign s_tready = en;

  genvar i;
  generate
    for (i = 0; i < LANES; i = i + 1) begin : g_lane
      logic [15:0] a;
      logic b_bad;
      logic [3:0] a_bad;
      assign a = s_tdata[16*i +: 16];
      fp16_product #(.SIG_W(11), .ACC_W(ACC_W)) lane (
          .clk(clk), .en(en), .a_sign(a[15]), .a_sig(fp16_sig(a)), .a_shift(fp16_shift(a)),
          .b(s_tdata[16*(LANES+i) +: 16]), .ones(node[(LANES+i)*ACC_W +: ACC_W]), .minus(owes[LANES+i]), .bad(b_bad));
      always_ff @(posedge clk) if (en) a_bad <= {a_bad[2:0], fp16_bad(a)};
      assign bad[LANES+i] = a_bad[3] || b_bad;
    end
    for (i = 1; i < LANES; i = i + 1) begin : g_node
      logic [ACC_W:0] total;
      assign total = {node[2*i*ACC_W +: ACC_W], 1'b1} + {node[(2*i+1)*ACC_W +: ACC_W], owes[2*i]};
      always_ff @(posedge clk) begin
        if (en) begin
          node[i*ACC_W +: ACC_W] <= total[ACC_W:1];
          owes[i] <= owes[2*i+1];
          bad[i]  <= bad[2*i] || bad[2*i+1];
        end
      end
    end
  endgenerate

  logic [DEPTH-1:0] valid, first, last;
  logic [DEPTH*ID_W-1:0] id;
  logic [ACC_W-1:0] acc [0:CONTEXTS-1];
  logic [CONTEXTS-1:0] acc_bad;
  logic [ID_W-1:0] now;
  logic [ACC_W:0] sum;
  logic sum_bad;

  assign now = id[(DEPTH-1)*ID_W +: ID_W];
  assign sum = {first[DEPTH-1] ? {ACC_W{1'b0}} : acc[now], 1'b1} + {node[ACC_W +: ACC_W], owes[1]};
  assign sum_bad = bad[1] || (!first[DEPTH-1] && acc_bad[now]);

  always_ff @(posedge clk) begin
    if (en) begin
      valid <= {valid[DEPTH-2:0], s_tvalid};
      first <= {first[DEPTH-2:0], s_tuser};
      last  <= {last[DEPTH-2:0], s_tlast};
      id    <= {id[(DEPTH-1)*ID_W-1:0], s_tid};
      if (valid[DEPTH-1]) begin
        acc[now]     <= sum[ACC_W:1];
        acc_bad[now] <= sum_bad;
      end
      m_tvalid <= valid[DEPTH-1] && last[DEPTH-1];
      m_tdata  <= sum[ACC_W:1];
      m_tid    <= now;
      m_tuser  <= sum_bad;
    end
    if (rst) begin
      valid    <= '0;
      m_tvalid <= 1'b0;
    end
  end
endmodule
