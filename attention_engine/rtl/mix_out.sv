// One channel of the output: out + rest x v_mean as FP16, rounded to nearest even.
//
// s_out: 48 bits, 30 behind the point. s_rest: 1 - alpha in units of 2^-24. s_mean: FP16, NaN and infinity as zero. The
// product is cut to 30 bits behind the point. What exceeds FP16 saturates at its largest value. One a cycle, four cycles.
module mix_out (
    input  logic        clk,
    input  logic        rst,
    input  logic        s_tvalid,
    output logic        s_tready,
    input  logic [47:0] s_out,
    input  logic [24:0] s_rest,
    input  logic [15:0] s_mean,
    input  logic        s_tlast,
    output logic        m_tvalid,
    input  logic        m_tready,
    output logic [15:0] m_tdata,
    output logic        m_tlast
);
  `include "fp16.svh"

  logic en;
  logic [3:0] valid, last;
  logic [35:0] product;
  logic [4:0] shift;
  logic [64:0] moved;
  logic [47:0] out_0, mixed, size;
  logic minus;
  logic sign;
  logic [5:0] zeros, zeros_2;
  logic [47:0] size_2, normal;
  logic [15:0] exponent, rounded;
  logic [9:0] mant;
  logic guard, sticky, even;
  integer j;

  assign en = m_tready || !m_tvalid;
  assign s_tready = en;
  assign m_tvalid = valid[3];
  assign m_tlast = last[3];
  assign moved = {29'b0, product} << shift;

  assign size = mixed[47] ? -mixed : mixed;

  always_comb begin
    zeros = 6'd48;
    for (j = 0; j < 48; j = j + 1) if (size[j]) zeros = 6'(47 - j);
  end

  // The leading one is worth 2^(17 - zeros); from 2^-15 down FP16 has one exponent left
  assign normal = size_2 << (zeros_2 > 6'd31 ? 6'd31 : zeros_2);
  assign exponent = zeros_2 > 6'd31 ? 16'd0 : 16'(32 - zeros_2);
  assign mant = normal[46:37];
  assign guard = normal[36];
  assign sticky = normal[35:0] != '0;
  assign even = guard && (sticky || mant[0]);
  assign rounded = {1'b0, exponent[4:0], mant} + {15'b0, even};

  always_ff @(posedge clk) begin
    if (en) begin
      valid <= {valid[2:0], s_tvalid};
      last <= {last[2:0], s_tlast};
      product <= s_rest * fp16_sig(s_mean);
      shift <= fp16_shift(s_mean);
      minus <= s_mean[15];
      out_0 <= s_out;
      mixed <= minus ? out_0 - 48'(moved >> 18) : out_0 + 48'(moved >> 18);
      size_2 <= size;
      zeros_2 <= zeros;
      sign <= mixed[47];
      m_tdata <= {sign, exponent > 16'd30 || rounded[14:10] == 5'd31 ? 15'h7BFF : rounded[14:0]};
    end
    if (rst) valid <= '0;
  end
endmodule
