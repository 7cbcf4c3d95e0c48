"""Paths of other servers and OpenAI that are not served here, each with what does it: said with 404.

Those for administrators are served with ``--admin-api-key`` alone; without it they are as unknown as the others.
"""

from __future__ import annotations

_ADMIN = "it is the administrator's, of a server started with"
_WEIGHTS = (
    "POST /update_weights_from_disk takes new weights here, from a folder, for the administrator (--admin-api-key)"
)
_TIERS = "each cache tier has limits of its own (--hicache-size and the like), and forgets what was used least recently"
_CACHE = (
    "nothing drops the prefix cache here: new weights do, and cache_salt keeps a request's prompts apart from others'"
)
_STOPPING = "a server is stopped by SIGTERM here, and GET /ready tells whether new requests are taken"
_LOG = "--log-level and --log-requests are set at the start here"
_SESSION = "requests of one session say so in session_id here, and share their prompts' K/V by the prefix cache"
_RANKS = "engines and ranks are one server's own affair here: GET /server_info tells of them"
_CLOUD = "requests of clouds' model hosts go to /v1/chat/completions here"

_SAID = {
    "GET /health tells whether the server answers here, and GET /ready whether it takes new requests": (
        "/healthz", "/liveness", "/readiness", "/health_generate", "/health_check", "/frontend_health", "/status",
        "/ping", "/v2/health/live", "/v2/health/ready",
    ),
    "GET /server_info tells it here": (
        "/get_server_info", "/get_load", "/v1/loads", "/load", "/token_load", "/worker_status", "/cache_status",
        "/get_weight_version", "/weight_version", "/get_internal_state", "/server_load", "/slots", "/v2",
    ),
    "POST /tokenize counts and lists a text's tokens here": (
        "/tokens", "/tokenizer/encode", "/v1/tokenize", "/chat_tokenize",
    ),
    "POST /detokenize makes text of tokens here": ("/v1/detokenize",),
    "POST /apply-template renders a chat here": ("/chat/render", "/v1/chat/render"),
    "POST /v1/embeddings, or /pooling, makes vectors here": (
        "/encode", "/v1/encode", "/get_score", "/embedding", "/embed", "/embed_all", "/embed_sparse", "/v2/embed",
    ),
    "POST /v1/rerank orders texts by a query here": ("/reranking", "/v1/reranking"),
    "POST /classify scores texts here": ("/predict",),
    "POST /score compares texts here": ("/similarity",),
    "GET /docs shows the APIs here": ("/redoc",),
    "a vocabulary stays where its files are: POST /tokenize and /detokenize use it here": ("/dump_tokenizer",),
    "--lora-paths loads adapters here, and a request names one; /v1/load_lora_adapter is the administrator's": (
        "/lora-adapters",
    ),
    "POST /v1/responses keeps conversations and runs tools here": (
        "/v1/assistants", "/v1/threads", "/v1/threads/runs",
    ),
    "POST /v1/completions and /v1/chat/completions answer here": (
        "/v1/edits", "/v1/complete", "/v1/chat/interactive", "/api/v1/generate", "/inference",
    ),
    "a stream of /v1/chat/completions or /v1/responses is read over HTTP here": ("/v1/realtime",),
    "models are not trained here, but drafters: fwk train-draft": ("/v1/fine_tuning/jobs", "/v1/fine-tunes"),
    "files are for batches here: no store of them is searched": ("/v1/vector_stores",),
    "POST /generate and /generate_stream take texts and token ids here": ("/id_generate",),
    "--disaggregation-mode has servers speak among themselves here": ("/pd_generate_stream",),
    "calls are read in the answers of /v1/chat/completions here, by --tool-call-parser": ("/parse_function_call",),
    "answers of /v1/chat/completions have their thinking apart here, by --reasoning-parser": ("/separate_reasoning",),
    _CACHE: ("/flush_cache", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"),
    _TIERS: (
        "/clear_hicache_storage_backend", "/hicache/storage-backend", "/attach_hicache_storage_backend",
        "/detach_hicache_storage_backend",
    ),
    "a request ends when its client closes the connection here": ("/abort_request", "/abort_requests"),
    _WEIGHTS: (
        "/update_weights_from_tensor", "/update_weights_from_distributed", "/update_weights_from_ipc",
        "/init_weights_update_group", "/destroy_weights_update_group", "/update_weight_version", "/update_weights",
        "/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance",
        "/start_weight_update", "/finish_weight_update",
    ),
    "--load-format remote_instance starts a server from another's weights here": (
        "/get_weights_by_name", "/remote_instance_transfer_engine_info", "/get_remote_instance_transfer_engine_info",
    ),
    f"{_ADMIN} --admin-api-key": ("/update_weights_from_disk",),
    f"{_ADMIN} --admin-api-key, and of the feature plugin_switch (fwk plugins list)": ("/plugins/switch",),
    f"{_ADMIN} --enable-memory-saver and --admin-api-key": (
        "/release_memory_occupation", "/resume_memory_occupation", "/sleep", "/wake_up", "/is_sleeping",
    ),
    f"{_ADMIN} --profiler-dir and --admin-api-key": (
        "/start_profile", "/stop_profile", "/profiler_start", "/profiler_stop",
    ),
    f"{_ADMIN} --enable-lora and --admin-api-key": (
        "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/load_lora_adapter", "/unload_lora_adapter",
    ),
    f"{_ADMIN} --expert-distribution-recorder-mode and --admin-api-key": (
        "/start_expert_distribution_record", "/stop_expert_distribution_record", "/dump_expert_distribution_record",
    ),
    _SESSION: ("/open_session", "/close_session"),
    _STOPPING: ("/pause_generation", "/continue_generation", "/pause", "/resume", "/is_paused", "/slow_down"),
    _LOG: ("/configure_logging", "/set_log_level", "/freeze_gc"),
    _RANKS: (
        "/set_internal_state", "/collective_rpc", "/scale_elastic_ep", "/is_scaling_elastic_ep",
        "/update_scheduler_info", "/dumper", "/server_status", "/rpc",
    ),
    _CLOUD: ("/invocations", "/vertex_generate"),
    "POST /generate takes texts here, and POST /v1/batches files of requests": ("/generate_from_file",),
    "no model here takes or makes sound": ("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
    "no model here makes images": ("/v1/images/generations", "/v1/images/edits"),
}  # fmt: skip

ROUTES = {path: f"{path} is not served here: {said}" for said, paths in _SAID.items() for path in paths}
"""By path, what is said."""
