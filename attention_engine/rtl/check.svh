// A parameter set that cannot be stops at elaboration; Icarus 11 knows no $fatal there and stops before time begins.
`ifndef CHECK
`ifdef __ICARUS__
`define CHECK(ok, text) initial if (!(ok)) $fatal(1, text);
`else
`define CHECK(ok, text) generate if (!(ok)) begin : g_illegal $fatal(1, text); end endgenerate
`endif
`endif
