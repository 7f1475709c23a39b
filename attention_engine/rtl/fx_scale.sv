`include "check.svh"

// Converts exact sums to fixed point: round(sum x mant x 2^-exp), OUT_W bits with OUT_FRAC fractional bits.
//
// The sum, in units of 2^-48, is truncated to its leading 32 bits, multiplied by a 24-bit scale and rounded to nearest,
// ties away from zero. A result out of range saturates and sets m_over. Throughput: one per cycle; latency: eleven
// cycles. s_tuser is passed through.
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
  localparam int Z_W = $clog2(ACC_W);
  localparam int NORM = (Z_W + 1) / 2;      // cycles of normalize
  localparam int LATENCY = NORM + 7;
  localparam int KEEP = 55 - OUT_W;  // low bits of the product that no result in range includes
  localparam int CUT_W = 56 - KEEP;
  localparam int BIAS = ACC_W - 80 + OUT_FRAC + KEEP + 1;  // value of a zero shift

  `CHECK(ACC_W > 32 && ACC_W <= 96, "fx_scale: ACC_W must be 33 to 96")
  `CHECK(OUT_W >= 16 && OUT_W <= 55, "fx_scale: OUT_W must be 16 to 55")

  logic en;
  logic [LATENCY-1:0] valid;
  logic [LATENCY-2:0] sign;
  logic [LATENCY*USER_W-1:0] user;
  logic [(NORM+2)*31-1:0] scales;
  logic [ACC_W-1:0] sum, mag, normal;
  logic [Z_W-1:0] zeros;
  logic [30:0] scale_now;
  logic [39:0] raw_low, raw_high;
  logic [55:0] raw;
  logic signed [9:0] shift, shift_1;
  logic [CUT_W-1:0] moved;
  logic over, over_1;
  logic [OUT_W:0] rounded;
  logic high;
  logic [OUT_W-1:0] size;

  assign en = m_tready || !m_tvalid;
  assign s_tready = en;
  assign m_tvalid = valid[LATENCY-1];
  assign m_tuser = user[(LATENCY-1)*USER_W +: USER_W];
  assign scale_now = scales[(NORM+1)*31 +: 31];
  assign high = over_1 || rounded[OUT_W] || rounded[OUT_W-1];
  assign size = high ? {1'b0, {(OUT_W-1){1'b1}}} : rounded[OUT_W-1:0];

  normalize #(.W(ACC_W)) norm (.clk(clk), .en(en), .value(mag), .normal(normal), .zeros(zeros));

  always_ff @(posedge clk) begin
    if (en) begin
      valid  <= {valid[LATENCY-2:0], s_tvalid};
      user   <= {user[(LATENCY-1)*USER_W-1:0], s_tuser};
      scales <= {scales[(NORM+1)*31-1:0], s_mant, s_exp};
      sum <= s_tdata;
      sign <= {sign[LATENCY-3:0], s_tdata[ACC_W-1]};
      mag <= sum[ACC_W-1] ? -sum : sum;
      raw_low  <= normal[ACC_W-32 +: 16] * scale_now[30:7];
      raw_high <= normal[ACC_W-16 +: 16] * scale_now[30:7];
      shift <= $signed({3'b0, scale_now[6:0]}) + $signed({1'b0, zeros}) - 10'(BIAS);
      raw <= {raw_high, 16'b0} + {16'b0, raw_low};
      shift_1 <= shift;
      over <= shift_1 < 0 && raw != '0;
      moved <= raw[55:KEEP] >> (shift_1 > 63 ? 6'd63 : shift_1[5:0]);
      over_1 <= over;
      rounded <= (moved >> 1) + moved[0];
      m_tdata <= sign[LATENCY-2] ? -size : size;
      m_over <= high;
    end
    if (rst) valid <= '0;
  end
endmodule
