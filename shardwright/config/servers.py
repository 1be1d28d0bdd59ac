"""Section [servers] of a recipe: table servers that the run starts, or that run already."""

from pydantic import Field

from shardwright.config.sections import ByteText, Section, parse_bytes
from shardwright.errors import UserError


class ServerSettings(Section):
    start: int = Field(0, ge=0, le=64, description="table servers that the run starts on this host, and ends; 0: none")
    addresses: tuple[str, ...] = Field(
        (), strict=False, description="addresses of table servers that run already, instead of `start`"
    )
    keys: str = Field("", description="key file of the trainers, for table servers on other hosts")
    own: bool = Field(
        False,
        description="servers own all rows, and ranks have copies; false: they have rows that ranks have no room for",
    )
    memory: ByteText = Field("", description='memory of each table server, "64 GB"; empty: enough for all rows')
    timeout: float = Field(
        60.0, gt=0, strict=False, description="seconds without a message from a table server after which the run fails"
    )

    @property
    def num(self) -> int:
        """The number of table servers; 0: the section is not used."""
        return self.start or len(self.addresses)

    @property
    def bytes_(self) -> int:
        """Memory of each server; 0: enough."""
        return parse_bytes(self.memory) if self.memory else 0

    def check(self, where: str) -> None:
        """Raise a UserError for keys that do not work together; `where` names their source."""
        if self.start and self.addresses:
            raise UserError(
                f"{where}: servers.start={self.start} starts table servers, and servers.addresses names servers that "
                "run already: drop one of the two"
            )
        if self.keys and not self.addresses:
            raise UserError(
                f"{where}: servers.keys={self.keys} is for table servers on other hosts: set servers.addresses, or "
                "drop it"
            )
        for name, is_set in (("own", self.own), ("memory", self.memory)):
            if is_set and not self.num:
                raise UserError(
                    f"{where}: servers.{name} is set, and there are no table servers: set servers.start or "
                    "servers.addresses"
                )
