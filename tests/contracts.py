"""A contract for import-linter: the only packages outside the project that some modules may import."""

import sys
from typing import Any

import grimp
from importlinter import Contract, ContractCheck, fields, output


class OutsideContract(Contract):
    """Allow no imports from outside the project but the standard library and the packages listed.

    Configuration options:
        - modules: packages of the project, each with all that is below it.
        - allowed: names of packages outside the project.
    """

    type_name = "outside"

    modules = fields.ListField(subfield=fields.StringField())
    allowed = fields.SetField(subfield=fields.StringField(), required=False)

    def check(self, graph: grimp.ImportGraph, verbose: bool) -> ContractCheck:
        ours = set(self.session_options["root_packages"])
        allowed = {*(self.allowed or ()), *ours, *sys.stdlib_module_names}  # type: ignore
        sources = [m for name in self.modules for m in (name, *graph.find_descendants(name))]  # type: ignore
        wrong = [
            f"{source} imports {target}"
            for source in sorted(sources)
            for target in sorted(graph.find_modules_directly_imported_by(source))
            if target.partition(".")[0] not in allowed
        ]
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        metadata: dict[str, Any] = check.metadata
        for line in metadata["wrong"]:
            output.print_error(line)
