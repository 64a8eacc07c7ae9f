# SPDX-License-Identifier: Apache-2.0
"""The dense side of an end-to-end measurement: a whole model over bfloat16 pages."""

import torch
from gpu_baselines import PAGE_TOKENS, DensePaged, append_state
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


class RandomStates:
    """Keys and values of a prompt, made when a layer asks: all at once would not fit."""

    def __init__(self, config, context):
        self.context, self.layers = context, config.num_hidden_layers
        self.heads, self.dim = config.num_key_value_heads, config.head_dim

    def layer(self, layer):
        generator = torch.Generator("cuda").manual_seed(layer)
        shape = (1, self.heads, self.context, self.dim)
        return tuple(
            torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)
            for _ in range(2)
        )

    @property
    def dense_bytes(self):
        """Bytes of one sequence in bfloat16 pages, the one it grows into included."""
        tokens = self.context + PAGE_TOKENS
        return 4 * self.layers * self.heads * self.dim * tokens


class PassThrough(CacheLayerMixin):
    """Hands states to the attention function, which keeps them."""

    is_sliding = False

    def lazy_initialization(self, *_):
        self.is_initialized = True

    def update(self, keys, values, *_, **__):
        return keys, values

    def get_seq_length(self):
        return 0

    def get_mask_sizes(self, query_length):
        return query_length, 0

    def get_max_length(self):
        return -1

    def get_max_cache_shape(self):
        return -1


class DenseDecoder:
    """One step of a batch over dense pages, in a CUDA graph."""

    def __init__(self, model, states, batch):
        self.model, self.batch = model, batch
        self.length = states.context
        pages = self.length // PAGE_TOKENS + 1
        heads, dim = states.heads, states.dim
        query = torch.empty(batch, model.config.num_attention_heads, dim, device="cuda")
        self.pools = []
        for layer in range(states.layers):
            keys, values = states.layer(layer)
            pool = [
                torch.empty(
                    batch * pages, heads, PAGE_TOKENS, dim, dtype=torch.bfloat16, device="cuda"
                )
                for _ in range(2)
            ]
            for part, source in zip(pool, (keys, values), strict=True):
                paged = source[0].view(heads, -1, PAGE_TOKENS, dim).transpose(0, 1)
                part.view(batch, pages, heads, PAGE_TOKENS, dim)[:, : pages - 1] = paged
                part.view(batch, pages, heads, PAGE_TOKENS, dim)[:, pages - 1] = 0
            self.pools.append(pool)
        self.table = torch.arange(batch * pages, dtype=torch.int32, device="cuda").view(batch, -1)
        self.query, self.heads, self.kernel = query.bfloat16(), heads, None
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device="cuda")
        self.position = torch.full((batch, 1), self.length, device="cuda")
        self.last_page = self.table[:, -1].contiguous()
        self.graph = None

    def attend(self, module, query, keys, values, mask, **options):
        pool = self.pools[module.layer_idx]
        append_state(keys[:, :, 0], values[:, :, 0], pool, self.last_page)
        kernel = self.kernel
        kernel.query, kernel.keys, kernel.values = query[:, :, 0].contiguous(), *pool
        kernel.out = torch.empty_like(kernel.query)
        output = kernel(self.table, self.length + PAGE_TOKENS, options["scaling"])
        return output[:, None], None

    @torch.no_grad()
    def forward(self):
        cache = Cache(layers=[PassThrough() for _ in self.pools])
        output = self.model(
            input_ids=self.tokens,
            past_key_values=cache,
            position_ids=self.position,
            use_cache=True,
            logits_to_keep=1,
        )
        self.tokens.copy_(output.logits[:, -1].argmax(-1, keepdim=True))

    def capture(self, config):
        self.kernel = DensePaged(self.query, *self.pools[0], self.heads, config[:3], config[3])
        ALL_ATTENTION_FUNCTIONS.register("dense_paged", self.attend)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation("dense_paged")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.forward()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.forward()
        self.model.set_attn_implementation(before)
        # the registry must not keep the pages of this decoder alive
        ALL_ATTENTION_FUNCTIONS.register("dense_paged", None)
