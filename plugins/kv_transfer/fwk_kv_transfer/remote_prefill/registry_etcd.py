"""A registry in etcd (3.4 and newer), by its JSON gateway: a key with a lease for each prefill server."""

from __future__ import annotations

import base64
import ssl
from typing import Any

import msgspec

from fwk_kv_transfer.remote_prefill.posting import PeerError, post
from fwk_kv_transfer.remote_prefill.registry import MAX_ENTRIES, MAX_ENTRY_BYTES, Registry, RegistryError

PREFIX = "fwk/prefill"


class EtcdRegistry(Registry):
    """Any member that answers is asked. A lease that etcd has forgotten is granted anew."""

    URL = r"etcds?://[^/@?#\s]+:[0-9]{1,5}(,[^/@?#,\s]+:[0-9]{1,5})*(/[\x21-\x7e]*)?"

    def __init__(self, url: str) -> None:
        super().__init__(url)
        scheme, _, rest = url.partition("://")
        members, _, prefix = rest.partition("/")
        self._tls = ssl.create_default_context() if scheme == "etcds" else None
        self._members = [f"{'https' if self._tls else 'http'}://{member}" for member in members.split(",")]
        self._prefix = (prefix.strip("/") or PREFIX) + "/"
        self._leases: dict[str, str] = {}  # by name

    async def put(self, name: str, entry: bytes, seconds: float) -> None:
        if not await self._is_kept(name):
            granted = await self._ask("/v3/lease/grant", {"TTL": round(max(seconds, 1.0)), "ID": "0"})
            lease = str(granted.get("ID", ""))
            await self._ask("/v3/kv/put", {"key": self._key(name), "value": _base64(entry), "lease": lease})
            self._leases[name] = lease

    async def _is_kept(self, name: str) -> bool:
        """Renew the lease of an entry; it is not put again while it is there, for etcd keeps what was before."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return False
        alive = await self._ask("/v3/lease/keepalive", {"ID": lease})
        if int(alive.get("result", {}).get("TTL", 0)) <= 0:
            return False
        told = await self._ask("/v3/kv/range", {"key": self._key(name), "count_only": True})
        if int(told.get("count", 0)) == 0:
            return False
        self._leases[name] = lease
        return True

    def _key(self, name: str) -> str:
        return _base64(self._prefix + name)

    async def remove(self, name: str) -> None:
        if name in self._leases:
            await self._ask("/v3/lease/revoke", {"ID": self._leases.pop(name)})

    async def entries(self) -> list[bytes]:
        first = self._prefix.encode()
        end = first[:-1] + bytes([first[-1] + 1])
        asked = {"key": _base64(first), "range_end": _base64(end), "limit": str(MAX_ENTRIES)}
        told = await self._ask("/v3/kv/range", asked)
        try:
            values = [base64.b64decode(pair.get("value", "")) for pair in told.get("kvs", [])]
        except (AttributeError, TypeError, ValueError):
            raise RegistryError("does not answer as etcd does") from None
        return [value for value in values if len(value) <= MAX_ENTRY_BYTES]

    async def _ask(self, path: str, question: dict[str, Any]) -> dict[str, Any]:
        why = ""
        for member in list(self._members):
            try:
                answer = await post(
                    member, path, {"content-type": "application/json"}, msgspec.json.encode(question), self._tls
                )
                told = msgspec.json.decode(answer.body, type=dict[str, Any])
            except TimeoutError:
                why = f"cannot be reached ({member} does not answer)"
            except EOFError:
                why = f"has ended the connection ({member})"
            except OSError as error:
                why = f"cannot be reached ({member}: {error.strerror or error})"
            except (PeerError, msgspec.DecodeError, ValueError):
                why = f"does not answer as etcd does ({member})"
            else:
                if answer.status == 200:
                    return told
                why = f"refuses: {str(told.get('error', answer.status))[:200]} ({member})"
            self._members.append(self._members.pop(0))  # the next one is asked first from now on
        raise RegistryError(why)


def _base64(data: str | bytes) -> str:
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()
