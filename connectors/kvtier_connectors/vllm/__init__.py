"""kvtier in vLLM: a KV connector, named by `kv_connector_module_path` in `--kv-transfer-config`.

This package imports vLLM, and nothing else of kvtier imports this package.
"""

from kvtier_connectors.vllm.connector import KVTierConnector

__all__ = ["KVTierConnector"]
