// An FP16 value is sig x 2^(shift - 24) with an 11-bit sig; NaN and infinity are read as zero and reported.
function automatic logic fp16_bad(input logic [15:0] value);
  fp16_bad = value[14:10] == 5'd31;
endfunction

function automatic logic [10:0] fp16_sig(input logic [15:0] value);
  fp16_sig = fp16_bad(value) ? 11'd0 : {value[14:10] != 5'd0, value[9:0]};
endfunction

function automatic logic [4:0] fp16_shift(input logic [15:0] value);
  fp16_shift = (value[14:10] == 5'd0 || fp16_bad(value)) ? 5'd0 : value[14:10] - 5'd1;
endfunction
