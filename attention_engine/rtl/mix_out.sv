// One channel of the output: out + rest x v_mean as FP16, rounded to nearest even.
//
// s_out: 48 bits with 30 fractional bits. s_rest: 1 - alpha in units of 2^-24. s_mean: FP16; NaN and infinity are zero.
// The product is truncated to 30 fractional bits. Results outside FP16 saturate at the largest value. Throughput: one
// per cycle; latency: nine cycles.
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

  localparam int NORM = 3;  // cycles of normalize
  localparam int LATENCY = 6 + NORM;

  logic en;
  logic [LATENCY-1:0] valid, last;
  logic [35:0] product;
  logic [4:0] shift;
  logic [64:0] moved;
  logic [47:0] out_0, out_1, mixed, size, normal, tiny, kept;
  logic [46:0] addend;
  logic minus, minus_1;
  logic [LATENCY-4:0] sign;
  logic [NORM*48-1:0] sizes;
  logic [5:0] zeros;
  logic [5:0] exponent;
  logic [15:0] rounded;
  logic even;

  assign en = m_tready || !m_tvalid;
  assign s_tready = en;
  assign m_tvalid = valid[LATENCY-1];
  assign m_tlast = last[LATENCY-1];
  assign moved = {29'b0, product} << shift;

  // The leading one has the value 2^(17 - zeros); from 2^-15 down, FP16 values are subnormal
  normalize #(.W(48)) norm (.clk(clk), .en(en), .value(size), .normal(normal), .zeros(zeros));

  assign tiny = sizes[(NORM-1)*48 +: 48] << 31;
  assign even = kept[36] && (kept[35:0] != '0 || kept[37]);
  assign rounded = {1'b0, exponent[4:0], kept[46:37]} + {15'b0, even};

  always_ff @(posedge clk) begin
    if (en) begin
      valid <= {valid[LATENCY-2:0], s_tvalid};
      last <= {last[LATENCY-2:0], s_tlast};
      product <= s_rest * fp16_sig(s_mean);
      shift <= fp16_shift(s_mean);
      minus <= s_mean[15];
      out_0 <= s_out;
      addend <= 47'(moved >> 18);
      minus_1 <= minus;
      out_1 <= out_0;
      mixed <= minus_1 ? out_1 - {1'b0, addend} : out_1 + {1'b0, addend};
      sign <= {sign[LATENCY-5:0], mixed[47]};
      size <= mixed[47] ? -mixed : mixed;
      sizes <= {sizes[(NORM-1)*48-1:0], size};
      kept <= zeros > 6'd31 ? tiny : normal;
      exponent <= zeros > 6'd31 ? 6'd0 : 6'd32 - zeros;
      m_tdata <= {sign[LATENCY-5], exponent > 6'd30 || rounded[14:10] == 5'd31 ? 15'h7BFF : rounded[14:0]};
    end
    if (rst) valid <= '0;
  end
endmodule
