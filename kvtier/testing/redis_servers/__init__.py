"""Real Redis servers for tests and benchmarks: alone, as a cluster, or watched by Sentinel.

On free ports of 127.0.0.1, with nothing on disk but a temporary directory, and gone at the end of the `with` block;
also when this process dies in it, by whatever signal. Linux, redis-server 6.2 or later, no redis-cli, no redis-py.
Each object may be used by any thread, by one at a time.
"""

from kvtier.testing.redis_servers.cluster import Migration, RedisCluster
from kvtier.testing.redis_servers.installed import require_redis_server
from kvtier.testing.redis_servers.sentinel import FailOver, RedisSentinel
from kvtier.testing.redis_servers.server import RedisServer
from kvtier.testing.redis_servers.tls import TlsFiles, make_tls_files
from kvtier.testing.redis_servers.wire import RedisConnection, RedisReplyError, Reply

__all__ = [
    "FailOver",
    "Migration",
    "RedisCluster",
    "RedisConnection",
    "RedisReplyError",
    "RedisSentinel",
    "RedisServer",
    "Reply",
    "TlsFiles",
    "make_tls_files",
    "require_redis_server",
]
