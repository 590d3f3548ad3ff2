//! Addresses that this node's host-local keeps reserved for a container that has moved to another node: their reservations stay, in the
//! name of a holder. host-local gives no address away that has a reservation, whoever it is of.

use std::net::IpAddr;

use tranship_types::ReservedAddress;

use super::files;
use crate::NetworkError;

/// What the name of a holder begins with; the container's name follows.
const HOLDER: &str = "tranship-holds-";

/// A reservation in the name of a holder.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HeldReservation {
    /// The network's name.
    pub network: String,
    /// The address.
    pub address: IpAddr,
    /// The container that it is held for.
    pub container: String,
}

/// In whose name addresses of the container of this name are held.
pub fn holder(container: &str) -> String {
    format!("{HOLDER}{container}")
}

/// For which container a holder of this name holds.
pub(super) fn held_for(holder: &str) -> Option<&str> {
    holder.strip_prefix(HOLDER)
}

/// Holds an address for the container of this name, if it is free, or its owner's, from whom it is taken. Otherwise whose it is.
///
/// # Errors
/// The system's refusals.
pub fn hold(container: &str, reserved: &ReservedAddress) -> Result<Option<String>, NetworkError> {
    files::hold(reserved, &holder(container), true)
}

/// The same, but takes nothing from the owner, who may be coming back.
///
/// # Errors
/// The system's refusals.
pub fn hold_if_free(container: &str, reserved: &ReservedAddress) -> Result<Option<String>, NetworkError> {
    files::hold(reserved, &holder(container), false)
}

/// Gives an address back that is held for the container of this name. Success if it is not.
///
/// # Errors
/// The system's refusals.
pub fn release_held(container: &str, network: &str, address: IpAddr) -> Result<(), NetworkError> {
    files::release(network, &holder(container), address)
}

/// In whose name an address is reserved.
///
/// # Errors
/// A reservation that is there and cannot be read.
pub fn owner(network: &str, address: IpAddr) -> Result<Option<String>, NetworkError> {
    Ok(files::reservation(network, address)?.map(|reservation| reservation.container))
}

/// All that is held on this node.
///
/// # Errors
/// Files that are there and cannot be read.
pub fn held() -> Result<Vec<HeldReservation>, NetworkError> {
    let held = |reservation: files::Reservation| {
        let container = held_for(&reservation.container)?.to_owned();
        Some(HeldReservation { network: reservation.network, address: reservation.address, container })
    };
    Ok(files::all()?.into_iter().filter_map(held).collect())
}
