`include "check.svh"

// Exact sums become fixed-point numbers: round(sum x mant x 2^-exp), OUT_W bits with OUT_FRAC behind the point.
//
// The sum, in units of 2^-48, is cut to its leading 32 bits, multiplied by a scale of 24 bits and rounded to nearest,
// halves away from zero. A result beyond the range saturates and says so in m_over. One a cycle, six cycles; s_tuser
// goes along.
module fx_scale #(
    parameter int ACC_W = 88,
    parameter int OUT_W = 48,
    parameter int OUT_FRAC = 30,
    parameter int USER_W = 1
) (
    input  logic              clk,
    input  logic              rst,
    input  logic              s_tvalid,
    output logic              s_tready,
    input  logic [ACC_W-1:0]  s_tdata,
    input  logic [23:0]       s_mant,
    input  logic [6:0]        s_exp,
    input  logic [USER_W-1:0] s_tuser,
    output logic              m_tvalid,
    input  logic              m_tready,
    output logic [OUT_W-1:0]  m_tdata,
    output logic              m_over,
    output logic [USER_W-1:0] m_tuser
);
  localparam int LZ_W = $clog2(ACC_W + 1);
  localparam int KEEP = 55 - OUT_W;  // low bits of the product that no result in range can reach
  localparam int CUT_W = 56 - KEEP;
  localparam int BIAS = ACC_W - 80 + OUT_FRAC + KEEP + 1;  // what a shift of none stands for

  `CHECK(ACC_W > 32 && ACC_W <= 96, "fx_scale: ACC_W must be 33 to 96")
  `CHECK(OUT_W >= 16 && OUT_W <= 55, "fx_scale: OUT_W must be 16 to 55")

  logic en;
  logic [5:0] valid;
  logic [6*USER_W-1:0] user;
  logic [ACC_W-1:0] mag, mag_1;
  logic [4:0] sign;
  logic [LZ_W-1:0] zeros, zeros_1;
  logic [31:0] mant;
  logic [23:0] scale_0, scale_1, scale_2;
  logic [6:0] exp_0, exp_1;
  logic signed [9:0] shift_2, shift_3;
  logic [55:0] raw;
  logic [CUT_W-1:0] moved;
  logic over_4;
  logic [OUT_W:0] rounded;
  logic [OUT_W-1:0] size;
  logic high;
  logic [ACC_W-1:0] normal;
  integer j;

  assign en = m_tready || !m_tvalid;
  assign s_tready = en;
  assign m_tvalid = valid[5];
  assign m_tuser = user[5*USER_W +: USER_W];
  assign normal = mag_1 << zeros_1;
  assign rounded = (moved >> 1) + moved[0];
  assign high = over_4 || rounded[OUT_W] || rounded[OUT_W-1];
  assign size = high ? {1'b0, {(OUT_W-1){1'b1}}} : rounded[OUT_W-1:0];

  always_comb begin
    zeros = ACC_W[LZ_W-1:0];
    for (j = 0; j < ACC_W; j = j + 1) if (mag[j]) zeros = LZ_W'(ACC_W - 1 - j);
  end

  always_ff @(posedge clk) begin
    if (en) begin
      valid <= {valid[4:0], s_tvalid};
      user  <= {user[5*USER_W-1:0], s_tuser};
      sign  <= {sign[3:0], s_tdata[ACC_W-1]};
      mag <= s_tdata[ACC_W-1] ? -s_tdata : s_tdata;
      {scale_0, exp_0} <= {s_mant, s_exp};
      mag_1 <= mag;
      zeros_1 <= zeros;
      {scale_1, exp_1} <= {scale_0, exp_0};
      mant <= normal[ACC_W-1 -: 32];
      scale_2 <= scale_1;
      shift_2 <= $signed({3'b0, exp_1}) + $signed({1'b0, zeros_1}) - 10'(BIAS);
      raw <= mant * scale_2;
      shift_3 <= shift_2;
      over_4 <= shift_3 < 0 && raw != '0;
      moved <= raw[55:KEEP] >> (shift_3 > 63 ? 6'd63 : shift_3[5:0]);
      m_tdata <= sign[4] ? -size : size;
      m_over <= high;
    end
    if (rst) valid <= '0;
  end
endmodule
