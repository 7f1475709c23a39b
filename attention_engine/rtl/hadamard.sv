`include "check.svh"

// Exact product of vectors of SIZE values and a Hadamard matrix of +1 and -1 in natural order, one vector after the
// other.
//
// s: values of IN_W bits, two's complement; m: SIZE values of OUT_W = IN_W + log2 SIZE bits. There is one stage for
// each halving: it stores the first values of the pairs, outputs sums while the second values arrive, and outputs
// differences while the next first values arrive. s_tuser is passed through with the value at the same position.
// Throughput: one value per cycle; latency: about SIZE + log2 SIZE cycles. A register in the middle splits the
// combinational ready path.
module hadamard #(
    parameter int SIZE = 64,
    parameter int IN_W = 64,
    parameter int USER_W = 1,
    parameter int LOG = $clog2(SIZE),
    parameter int OUT_W = IN_W + LOG
) (
    input  logic              clk,
    input  logic              rst,
    input  logic              s_tvalid,
    output logic              s_tready,
    input  logic [IN_W-1:0]   s_tdata,
    input  logic [USER_W-1:0] s_tuser,
    output logic              m_tvalid,
    input  logic              m_tready,
    output logic [OUT_W-1:0]  m_tdata,
    output logic [USER_W-1:0] m_tuser
);
  `CHECK(SIZE >= 4 && SIZE <= 128 && (1 << LOG) == SIZE, "hadamard: SIZE must be a power of two, 4 to 128")

  genvar s;

  logic [(LOG+1)*OUT_W-1:0] datas;
  logic [(LOG+1)*USER_W-1:0] users;
  logic [LOG:0] valids, readys;

  assign datas[0 +: OUT_W] = {{LOG{s_tdata[IN_W-1]}}, s_tdata};
  assign users[0 +: USER_W] = s_tuser;
  assign valids[0] = s_tvalid;
  assign s_tready = readys[0];
  assign readys[LOG] = m_tready;
  assign m_tvalid = valids[LOG];
  assign m_tdata = datas[LOG*OUT_W +: OUT_W];
  assign m_tuser = users[LOG*USER_W +: USER_W];

  generate
    for (s = 0; s < LOG; s = s + 1) begin : g_stage
      localparam int HALF_LOG = LOG - 1 - s;  // the values of a pair are 2^HALF_LOG apart
      localparam int HALF = 1 << HALF_LOG;
      localparam int W = IN_W + s + 1;
      localparam int AT_W = HALF_LOG > 0 ? HALF_LOG : 1;
      logic [W+USER_W-1:0] store [0:HALF-1];  // first values, then differences
      logic [W+USER_W-1:0] kept;
      logic [AT_W-1:0] in_at, out_at;
      logic [W-1:0] in, one;
      logic [USER_W-1:0] user_in, user_one;
      logic in_valid, in_ready, second, owes, en, take, give, fits, out_valid;  // owes: differences are pending
      logic [W-1:0] out;
      logic [USER_W-1:0] out_user;

      if (s == LOG / 2) begin : g_cut
        skid #(.W(W + USER_W)) cut (
            .clk(clk), .rst(rst), .s_tvalid(valids[s]), .s_tready(readys[s]), .s_tdata({datas[s*OUT_W +: W],
            users[s*USER_W +: USER_W]}), .m_tvalid(in_valid), .m_tready(in_ready), .m_tdata({in, user_in}));
      end else begin : g_through
        assign in = datas[s*OUT_W +: W];
        assign user_in = users[s*USER_W +: USER_W];
        assign in_valid = valids[s];
        assign readys[s] = in_ready;
      end
      assign en = readys[s+1] || !out_valid;
      assign kept = store[second ? in_at : out_at];
      assign {user_one, one} = kept;
      assign fits = !owes || in_at <= out_at;  // a first value replaces a difference after its output
      assign in_ready = second ? en && !owes : fits && (!owes || en);
      assign take = in_valid && in_ready;
      assign give = en && owes;
      assign valids[s+1] = out_valid;
      assign datas[(s+1)*OUT_W +: OUT_W] = OUT_W'($signed(out));
      assign users[(s+1)*USER_W +: USER_W] = out_user;

      always_ff @(posedge clk) begin
        if (take) begin
          store[in_at] <= second ? {user_in, one - in} : {user_in, in};
          in_at <= in_at == AT_W'(HALF - 1) ? '0 : in_at + 1'b1;
          if (in_at == AT_W'(HALF - 1)) second <= !second;
        end
        if (take && second && in_at == AT_W'(HALF - 1)) owes <= 1'b1;
        if (en) out_valid <= owes || (take && second);
        if (give) begin
          {out_user, out} <= kept;
          out_at <= out_at == AT_W'(HALF - 1) ? '0 : out_at + 1'b1;
          if (out_at == AT_W'(HALF - 1)) owes <= 1'b0;
        end else if (en) {out_user, out} <= {user_one, one + in};
        if (rst) begin
          in_at <= '0;
          out_at <= '0;
          {second, owes, out_valid} <= 3'b000;
        end
      end
    end
  endgenerate
endmodule
