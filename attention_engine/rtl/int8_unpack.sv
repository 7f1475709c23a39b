`include "check.svh"

// Converts a refined page to FP16: 8-bit keys and values, with an exponent for each K channel and each V token.
//
// s: the page, 2 x LANES bytes per beat; s_tlast ends it. A page has DIM exponents of the channels of K, exponents of
// the tokens of V, both padded to lines of DIM bytes, then rows of DIM codes of K, the same number of rows of V, and
// padding. m: code x 2^exponent, LANES values per beat, exact; m_tuser: value of V; m_end: end of a row; m_tlast: end
// of the rows of K or V. Values outside FP16 (an exponent not in -24..9, -128 x 2^9) are output as NaN or infinity,
// which later units treat as zero and report. Half a beat of s per cycle; latency: three cycles.
module int8_unpack #(
    parameter int DIM = 64,
    parameter int LANES = 32,
    parameter int PAGE_BYTES = 4096
) (
    input  logic                clk,
    input  logic                rst,
    input  logic                s_tvalid,
    output logic                s_tready,
    input  logic [16*LANES-1:0] s_tdata,
    input  logic                s_tlast,
    output logic                m_tvalid,
    input  logic                m_tready,
    output logic [16*LANES-1:0] m_tdata,
    output logic                m_tuser,
    output logic                m_end,
    output logic                m_tlast
);
  localparam int WORDS = DIM / LANES;
  localparam int ROWS = (PAGE_BYTES / DIM - 1) * DIM / (2 * DIM + 1);
  localparam int HEADER = 1 + (ROWS + DIM - 1) / DIM;  // lines before the rows
  localparam int V_WORDS = (ROWS + LANES - 1) / LANES;
  localparam int LINE_W = $clog2(HEADER + 2 * ROWS + 1);
  localparam int V_WORD_W = V_WORDS > 1 ? $clog2(V_WORDS) : 1;
  localparam int LANE_W = LANES > 1 ? $clog2(LANES) : 1;
  localparam int ROW_W = V_WORD_W + LANE_W + 1;
  localparam int WORD_W = WORDS > 1 ? $clog2(WORDS) : 1;

  `CHECK(DIM % LANES == 0, "int8_unpack: DIM must be a multiple of LANES")
  `CHECK(ROWS >= 1 && PAGE_BYTES % (2 * LANES) == 0, "int8_unpack: a page must have a row, and be whole beats")

  // Lines of DIM bytes: exponents of K, of V, rows of K, of V, the rest
  logic high, en, step, word_last, k_last, v_last, code, of_v;
  logic [WORD_W-1:0] word;
  logic [LINE_W-1:0] line;
  logic [8*LANES-1:0] part;
  logic [8*LANES-1:0] k_store [0:(1<<WORD_W)-1];
  logic [8*LANES-1:0] v_store [0:(1<<V_WORD_W)-1];
  logic [8*LANES-1:0] codes, exps, v_exps;
  logic [ROW_W-1:0] row;  // row of V, or index of the next exponent of V
  logic [2:0] valid;
  logic [2:0] flags, flags_1;  // {value of V, end of row, end of rows}

  assign en = m_tready || !m_tvalid;
  assign s_tready = en && high;
  assign step = s_tvalid && en;
  assign part = high ? s_tdata[8*LANES +: 8*LANES] : s_tdata[0 +: 8*LANES];
  assign word_last = word == WORD_W'(WORDS - 1);
  assign k_last = line == LINE_W'(HEADER + ROWS - 1);
  assign v_last = line == LINE_W'(HEADER + 2 * ROWS - 1);
  assign of_v = line >= LINE_W'(HEADER + ROWS);
  assign code = line >= LINE_W'(HEADER) && line < LINE_W'(HEADER + 2 * ROWS);
  assign v_exps = v_store[row[LANE_W +: V_WORD_W]];
  assign m_tvalid = valid[2];

  always_ff @(posedge clk) begin
    if (step) begin
      high <= !high;
      word <= word_last ? '0 : word + 1'b1;
      if (word_last && line != LINE_W'(HEADER + 2 * ROWS)) line <= line + 1'b1;
      if (line == '0) k_store[word] <= part;
      if (line != '0 && line < LINE_W'(HEADER) && row < ROW_W'(ROWS)) begin
        v_store[row[LANE_W +: V_WORD_W]] <= part;
        row <= row + ROW_W'(LANES);
      end
      if (k_last) row <= '0;
      else if (of_v && word_last) row <= row + 1'b1;
      if (s_tlast && high) begin
        word <= '0;
        line <= '0;
        row <= '0;
      end
    end
    if (en) begin
      valid <= {valid[1:0], step && code};
      codes <= part;
      exps <= of_v ? {LANES{v_exps[8*row[LANE_W-1:0] +: 8]}} : k_store[word];
      flags <= {of_v, word_last, word_last && (k_last || v_last)};
      flags_1 <= flags;
      {m_tuser, m_end, m_tlast} <= flags_1;
    end
    if (rst) begin
      high <= 1'b0;
      word <= '0;
      line <= '0;
      row <= '0;
      valid <= '0;
    end
  end

  genvar i;
  generate
    for (i = 0; i < LANES; i = i + 1) begin : g_lane
      logic [7:0] size_in, size;
      logic signed [7:0] exp_in, exp;
      logic [2:0] top_in, top;  // the leading one
      logic sign, bad, normal;
      logic signed [8:0] place;
      logic [3:0] shift;
      logic [17:0] moved;

      assign size_in = codes[8*i+7] ? -codes[8*i +: 8] : codes[8*i +: 8];
      assign exp_in = exps[8*i +: 8];
      assign top_in = size_in[7] ? 3'd7 : size_in[6] ? 3'd6 : size_in[5] ? 3'd5 : size_in[4] ? 3'd4
          : size_in[3] ? 3'd3 : size_in[2] ? 3'd2 : {2'b0, size_in[1]};
      assign place = exp + $signed({6'b0, top});
      assign normal = place >= -9'sd14;
      assign shift = normal ? 4'd10 - {1'b0, top} : 4'(exp + 8'sd24);  // below 2^-14 the unit is 2^-24
      assign moved = {10'b0, size} << shift;

      always_ff @(posedge clk) begin
        if (en) begin
          {size, exp, top, sign} <= {size_in, exp_in, top_in, codes[8*i+7]};
          bad <= exp_in < -8'sd24 || exp_in > 8'sd9;
          m_tdata[16*i +: 16] <= bad ? 16'h7E00 : size == '0 ? 16'h0000
              : {sign, normal ? 5'(place + 9'sd15) : 5'd0, moved[9:0]};
        end
      end
    end
  endgenerate
endmodule
