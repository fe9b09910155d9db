"""All faults, by section of the page, and by name."""

from __future__ import annotations

from faults_compared.arrays import ARRAYS
from faults_compared.calls import CALLS
from faults_compared.fault import Fault
from faults_compared.machine import MACHINE
from faults_compared.peers import PEERS
from faults_compared.start import START
from faults_compared.strangers import STRANGERS

SECTIONS: dict[str, tuple[Fault, ...]] = {
    "Peers": PEERS,
    "Calls that disagree": CALLS,
    "Arrays": ARRAYS,
    "The start": START,
    "Unauthenticated clients": STRANGERS,
    "The machine": MACHINE,
}
FAULTS = {fault.name: fault for faults in SECTIONS.values() for fault in faults}
