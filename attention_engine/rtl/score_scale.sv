`include "check.svh"

// Scale of the approximate scores of a query, log2(e) / sqrt(d |q[i]|_1 / |q|_1), as mant x 2^-exp with a 24-bit mant.
//
// s_whole, s_kept: the L1 norms of q and of its selected channels, in units of 2^-24. SCALE_MANT x 2^-SCALE_EXP is
// log2(e) / sqrt(d). A kept norm of zero is replaced by the whole norm (all scores are zero then); a ratio above 2^20
// saturates. Latency: 80 cycles for the ratio and 34 for its root.
module score_scale #(
    parameter int SCALE_MANT = 8557531,
    parameter int SCALE_EXP = 26
) (
    input  logic        clk,
    input  logic        rst,
    input  logic        s_tvalid,
    output logic        s_tready,
    input  logic [47:0] s_whole,
    input  logic [47:0] s_kept,
    output logic        m_tvalid,
    input  logic        m_tready,
    output logic [23:0] m_mant,
    output logic [6:0]  m_exp
);
  `CHECK(SCALE_MANT >= 8388608 && SCALE_MANT < 16777216, "score_scale: SCALE_MANT must have 24 bits")

  logic ratio_valid, ratio_ready, root_valid, busy, scaled, ready;
  logic [79:0] ratio;
  logic [67:0] square;
  logic [33:0] root;
  logic [57:0] product, normal;
  logic [5:0] zeros;
  logic none, unit;
  logic [5:0] waits;  // waits for the product and its leading one
  logic [33:0] factor;
  logic [41:0] low, high;

  assign s_tready = ready && !busy;
  assign square = ratio[79:52] != '0 ? {68{1'b1}} : {ratio[51:0], 16'b0};
  assign m_tvalid = scaled;
  assign none = s_kept == '0;

  normalize #(.W(58)) norm (.clk(clk), .en(1'b1), .value(product), .normal(normal), .zeros(zeros));

  serial_divide #(.NUM_W(80), .DEN_W(48)) divide (
      .clk(clk), .rst(rst), .s_tvalid(s_tvalid && !busy), .s_tready(ready), .s_num(none ? {s_kept, 32'b0} : {s_whole, 32'b0}),
      .s_den(none ? 48'd1 : s_kept), .m_tvalid(ratio_valid), .m_tready(ratio_ready), .m_tdata(ratio));

  serial_root #(.W(68)) square_root (
      .clk(clk), .rst(rst), .s_tvalid(ratio_valid), .s_tready(ratio_ready),
      .s_tdata(unit ? {19'b0, 1'b1, 48'b0} : square),
      .m_tvalid(root_valid), .m_tready(1'b1), .m_tdata(root));


  always_ff @(posedge clk) begin
    if (s_tvalid && s_tready) begin
      busy <= 1'b1;
      unit <= none;
    end
    waits <= {waits[4:0], root_valid};
    if (root_valid) factor <= root;
    low <= factor[16:0] * 24'(SCALE_MANT);
    high <= factor[33:17] * 24'(SCALE_MANT);
    product <= {high[40:0], 17'b0} + {16'b0, low};
    if (waits[5]) begin
      scaled <= 1'b1;
      m_mant <= normal[57:34];
      m_exp <= 7'(SCALE_EXP + 24 - 34) + {1'b0, zeros};
    end
    if (m_tvalid && m_tready) begin
      scaled <= 1'b0;
      busy <= 1'b0;
    end
    if (rst) begin
      busy <= 1'b0;
      scaled <= 1'b0;
      waits <= '0;
    end
  end
endmodule
