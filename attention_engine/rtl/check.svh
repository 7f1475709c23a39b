// Stops elaboration at an invalid parameter set. Icarus 11 does not support $fatal there and stops before time 0
// instead.
`ifndef CHECK
`ifdef __ICARUS__
`define CHECK(ok, text) initial if (!(ok)) $fatal(1, text);
`else
`define CHECK(ok, text) generate if (!(ok)) begin : g_illegal $fatal(1, text); end endgenerate
`endif
`endif
