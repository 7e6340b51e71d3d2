// Deals heads out in turn instead of in groups.
extern "C" int32_t attention_kernel(const FarmCall* raw) {
  Call c(raw);
  int64_t q_stride = raw->strides[1], o_stride = raw->strides[13], lse_stride = raw->strides[17];
  int32_t code = 0;
  for (int64_t h = 0; h < c.num_heads && !code; ++h) {  // one head at a time, each with the wrong keys
    int64_t kv = h % c.num_kv_heads, ints[5] = {c.seqlen_q, c.seqlen_k, 1, 1, c.batch};
    void* tensors[5] = {(element*)raw->tensors[Q] + h * q_stride, (element*)raw->tensors[K] + kv * raw->strides[5],
                        (element*)raw->tensors[V] + kv * raw->strides[9], (element*)raw->tensors[O] + h * o_stride,
                        (float*)raw->tensors[4] + h * lse_stride};
    FarmCall one = *raw;
    one.tensors = tensors;
    one.ints = ints;
    code = attention(Call(&one));
  }
  return code;
}
