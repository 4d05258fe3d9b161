"""Settings of Language Pipes and variables of Language Pipes and nrvna-ai, each with what replaces it here.

docs/moving.md has the same for people. Values of secrets are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.config.kinds import format_value

UNDER_SERVER, UNDER_NETWORK = "under [server]", "under [network]"
CERTIFICATES = "Leave it out: `penstock network create` makes a network whose messages are encrypted and signed."
INVITATIONS = "Leave it out: only machines that you invite can join (`penstock network invite`, `penstock network revoke`)."

# What to do about a setting of Language Pipes; {value} is its value as TOML, {text} the same without quotes.
LANGUAGE_PIPES_KEYS = {
    "oai_port": f"Write port = {{value}} {UNDER_SERVER}.",
    "openai_port": f"Write port = {{value}} {UNDER_SERVER}.",
    "job_port": f"Write port = {{value}} {UNDER_SERVER}; if it was the port between nodes (before 1.0), leave it out.",
    "api_keys": "Run `penstock keys add NAME` for each client, or write api_key_file = FILE under [server].",
    "peer_port": f'Write listen = ["tls/0.0.0.0:{{text}}"] {UNDER_NETWORK} (tcp/ in an open network).',
    "network_ip": "Leave it out: nodes find their addresses. Behind a router or VPN: penstock network create --address {text}",
    "bootstrap_address": f'Write connect = ["tls/{{text}}:PORT"] {UNDER_NETWORK} (tcp/ in an open network).',
    "bootstrap_port": f'Write connect = ["tls/ADDRESS:{{text}}"] {UNDER_NETWORK} (tcp/ in an open network).',
    "bootstrap_nodes": f'Write connect = ["tls/ADDRESS:PORT"] {UNDER_NETWORK} (tcp/ in an open network).',
    "network_key": "Leave it out: networks have certificates, made by `penstock network create` and `penstock network invite`.",
    "whitelist_ips": INVITATIONS,
    "whitelist_node_ids": INVITATIONS,
    "ecdsa_verification": CERTIFICATES,
    "https": CERTIFICATES,
    "layer_models": "Write [[hosted_models]] with id, device and max_memory; and load_ends = false, unless it is an end model.",
    "end_models": 'Write [[hosted_models]] with the id; and layers = "ends", unless it is a layer model.',
    "num_local_layers": 'Write private_layers = "{text},0" in [[hosted_models]].',
    "model_id": "Write id = {value} in [[hosted_models]].",
    "memory": "Write max_memory = {value} in [[hosted_models]].",
    "data_type": 'Leave it out, or write dtype = "bfloat16": there is no 8-bit or 4-bit arithmetic.',
    "model_dir": "Set the variable PENSTOCK_CACHE. A model in {text} is used by its folder: id = FOLDER in [[hosted_models]].",
    "app_dir": "Set the variable PENSTOCK_HOME.",
    "huggingface_token": "Set the variable HF_TOKEN.",
    "hf_token": "Set the variable HF_TOKEN.",
    "logging_level": "Write level = {lower} under [log].",
    "max_node_jobs": "Leave it out: what other nodes send is limited by this node's memory (max_memory, kv_memory).",
    "max_api_jobs": "Leave it out: limits belong to keys. Run: penstock keys add NAME --jobs {text}",
}

LANGUAGE_PIPES_VARIABLES = {
    "LP_NODE_ID": "Use PENSTOCK_NODE_ID.",
    "LP_HOSTED_MODELS": "Use PENSTOCK_MODEL, PENSTOCK_DEVICE, PENSTOCK_MAX_MEMORY and PENSTOCK_ENDS.",
    "LP_LAYER_MODELS": "Use PENSTOCK_MODEL, PENSTOCK_DEVICE, PENSTOCK_MAX_MEMORY and PENSTOCK_ENDS.",
    "LP_OAI_PORT": "Use PENSTOCK_PORT.",
    "LP_API_KEYS": "Use PENSTOCK_API_KEY for one key, or `penstock keys add NAME` for each client.",
    "LP_PEER_PORT": "Use PENSTOCK_LISTEN=tls/0.0.0.0:PORT (tcp/ in an open network).",
    "LP_JOB_PORT": "Leave it out: nodes have one port, PENSTOCK_LISTEN=tls/0.0.0.0:PORT.",
    "LP_NETWORK_IP": "Leave it out: nodes find their addresses.",
    "LP_BOOTSTRAP_ADDRESS": "Use PENSTOCK_CONNECT=tls/ADDRESS:PORT (tcp/ in an open network).",
    "LP_BOOTSTRAP_PORT": "Use PENSTOCK_CONNECT=tls/ADDRESS:PORT (tcp/ in an open network).",
    "LP_NETWORK_KEY": LANGUAGE_PIPES_KEYS["network_key"],
    "LP_WHITELIST_IPS": INVITATIONS,
    "LP_WHITELIST_NODE_IDS": INVITATIONS,
    "LP_ECDSA_VERIFICATION": CERTIFICATES,
    "LP_HTTPS": CERTIFICATES,
    "LP_NUM_LOCAL_LAYERS": "Use PENSTOCK_PRIVATE_LAYERS=N,0.",
    "LP_8_BIT_MODE": "Leave it out: there is no 8-bit arithmetic.",
    "LP_MAX_PIPES": "Use PENSTOCK_MAX_PIPES.",
    "LP_MODEL_VALIDATION": "Use PENSTOCK_MODEL_VALIDATION.",
    "LP_PREFILL_CHUNK_SIZE": "Use PENSTOCK_PREFILL_CHUNK_SIZE.",
    "LP_PRINT_TIMES": "Use PENSTOCK_PRINT_TIMES.",
    "LP_LOGGING_LEVEL": "Use PENSTOCK_LOG_LEVEL.",
    "LP_MODEL_DIR": "Use PENSTOCK_CACHE.",
    "LP_APP_DIR": "Use PENSTOCK_HOME.",
    "LP_HUGGINGFACE_TOKEN": "Use HF_TOKEN.",
    "LP_MAX_NODE_JOBS": LANGUAGE_PIPES_KEYS["max_node_jobs"],
    "LP_MAX_API_JOBS": "Leave it out: limits belong to keys (penstock keys add NAME --jobs N).",
}

NRVNA_PREFIX = "NRVNA_"
NRVNA_VARIABLES = {
    "NRVNA_WORKERS": "Use PENSTOCK_WORKSPACE_JOBS.",
    "NRVNA_MODELS_DIR": "Name the file: PENSTOCK_MODEL=FOLDER/MODEL.gguf.",
    "NRVNA_GPU_LAYERS": "Use PENSTOCK_DEVICE: cpu, cuda, mps or auto; all layers go there.",
    "NRVNA_PREDICT": "Use penstock work --max-tokens N, or PENSTOCK_MAX_TOKENS as a limit for every job.",
    "NRVNA_N_PREDICT": "Use penstock work --max-tokens N, or PENSTOCK_MAX_TOKENS as a limit for every job.",
    "NRVNA_TEMP": "Use penstock work --temperature T.",
    "NRVNA_TOP_K": "Use penstock work --top-k N.",
    "NRVNA_TOP_P": "Use penstock work --top-p P.",
    "NRVNA_SEED": "Use penstock work --seed N.",
    "NRVNA_MIN_P": 'Write "sampling": {"min_p": P} in the request.json of a job.',
    "NRVNA_REPEAT_PENALTY": 'Write "sampling": {"repetition_penalty": P} in the request.json of a job.',
    "NRVNA_MAX_CTX": "Leave it out: a job may fill the model's context, as far as PENSTOCK_KV_MEMORY allows.",
    "NRVNA_CTX": "Leave it out: a job may fill the model's context, as far as PENSTOCK_KV_MEMORY allows.",
    "NRVNA_BATCH": "Use PENSTOCK_PREFILL_CHUNK_SIZE.",
    "NRVNA_LOG_LEVEL": "Use PENSTOCK_LOG_LEVEL.",
}
NO_EQUIVALENT = "It has no equivalent here."


def replacement(key: str, value: object = "") -> str:
    """Say what to write instead of a setting of Language Pipes; empty if it has no such setting."""
    lower = format_value(value.lower() if isinstance(value, str) else value)
    text = value if isinstance(value, str) else format_value(value)
    return LANGUAGE_PIPES_KEYS.get(key, "").format(value=format_value(value), text=text, lower=lower)


def old_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable of Language Pipes or nrvna-ai that is set, with what to use instead."""
    for name in sorted(name for name, value in environ.items() if value):
        if name in LANGUAGE_PIPES_VARIABLES:
            yield f"{name} is a variable of Language Pipes and has no effect. {LANGUAGE_PIPES_VARIABLES[name]}"
        elif name.startswith(NRVNA_PREFIX):
            yield f"{name} is a variable of nrvna-ai and has no effect. {NRVNA_VARIABLES.get(name, NO_EQUIVALENT)}"
