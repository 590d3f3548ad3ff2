//! Routes of a network namespace, as it is made.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use netlink_packet_core::NLM_F_CREATE;
use netlink_packet_route::route::{
    RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use tranship_types::{Interface, NetworkIdentity, Route};

use crate::NetworkError;
use crate::capture::LOOPBACK_INDEX;
use crate::inject::LOOPBACK;
use crate::reply::Refusal;
use crate::rtnl::Rtnl;
use crate::rules;

/// Two routes may differ in nothing but their next hop; replacing one by the other would lose it.
const NLM_F_APPEND: u16 = 0x800;

/// Whether a route that is there stands for one that is asked for.
type StandsFor<'a> = dyn Fn(&Route, &Route) -> bool + 'a;

/// What makes the routes that an engine has attached those that are asked for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    delete: Vec<Route>,
    add: Vec<Route>,
}

impl Changes {
    /// From the routes that are there to those that are asked for, of which the source's engine has given those through
    /// the gateways `known`; it is empty where that is not known. This node's engine may be `another`.
    fn of(asked: &[Route], there: &[Route], (known, another): (&[IpAddr], bool)) -> Self {
        let is_through_engine_s = |route: &Route| route.gateway.is_some_and(|gateway| known.contains(&gateway));
        let is_engine_s = |route: &Route| route.destination.is_none() && is_through_engine_s(route);
        let may_be = |route: &Route| is_through_engine_s(route) || route.gateway.is_none() || known.is_empty();
        // One that is there stands for one that is asked for: the same; of another gateway; of another engine, which has
        // metrics of its own, and may prefer another interface.
        let same = |there: &Route, asked: &Route| there == asked;
        let place = |there: &Route, asked: &Route| may_be(asked) && place(there) == place(asked);
        let goal = |there: &Route, asked: &Route| another && is_engine_s(asked) && goal(there) == goal(asked);
        let ways: [&StandsFor<'_>; 3] = [&same, &place, &goal];
        let (mut missing, mut left): (Vec<&Route>, Vec<&Route>) = (asked.iter().collect(), there.iter().collect());
        for stands_for in ways {
            missing.retain(|asked| match left.iter().position(|there| stands_for(there, asked)) {
                Some(found) => {
                    left.remove(found);
                    false
                }
                None => true,
            });
        }
        // A program's through the engine's gateway goes through that of this node's. Where another engine gives none, nor
        // has it a default route.
        let add = |asked: &Route| {
            let stands_for = |there: &&Route| {
                there.destination.is_none() && family(there) == family(asked) && there.interface == asked.interface
            };
            match there.iter().find(stands_for).filter(|_| is_through_engine_s(asked)) {
                Some(own) => Some(Route { gateway: own.gateway, ..asked.clone() }),
                None => (!another || !is_engine_s(asked)).then(|| asked.clone()),
            }
        };
        let delete = left.into_iter().filter(|_| !known.is_empty()).cloned().collect();
        Self { delete, add: missing.into_iter().filter_map(add).collect() }
    }
}

/// Makes the routes that an engine has attached those that are asked for; it may be `another` than the source's.
///
/// # Errors
/// The kernel's refusals.
pub(crate) fn change(
    netns: &Path,
    rtnl: &mut Rtnl,
    identity: &NetworkIdentity,
    (attached, another): (&NetworkIdentity, bool),
) -> Result<(), NetworkError> {
    let known = (&*identity.given_gateways, another);
    let Changes { delete, add } = Changes::of(&identity.routes, &attached.routes, known);
    for route in &delete {
        self::delete(netns, rtnl, &attached.interfaces, route)?;
    }
    self::add(netns, rtnl, &attached.interfaces, add.iter())
}

fn family(route: &Route) -> Option<bool> {
    route.gateway.map(|gateway| gateway.is_ipv6())
}

/// What there is one route to, of those that differ in nothing but the gateway.
fn place(route: &Route) -> impl PartialEq {
    (goal(route), route.metric, route.interface.clone())
}

/// Where it leads to.
fn goal(route: &Route) -> impl PartialEq {
    (route.destination, family(route), route.table)
}

/// The index of a route's interface, which is one of these or `lo`.
fn interface_of(route: &Route, interfaces: &[Interface]) -> Option<u32> {
    // Each namespace has its own loopback interface, by the same number.
    let known = interfaces.iter().map(|i| (i.name.as_str(), i.index));
    known.chain([(LOOPBACK, LOOPBACK_INDEX)]).find(|(name, _)| *name == route.interface).map(|(_, index)| index)
}

fn delete(netns: &Path, rtnl: &mut Rtnl, interfaces: &[Interface], route: &Route) -> Result<(), NetworkError> {
    let Some(index) = interface_of(route, interfaces) else { return Ok(()) };
    let mut message = route_message(index, route);
    // Whoever has made it: any will do.
    message.header.protocol = RouteProtocol::Unspec;
    message.header.scope = RouteScope::NoWhere;
    rtnl.change(RouteNetlinkMessage::DelRoute(message), 0).map_err(|e| {
        let what = format!("delete the route to {} in network namespace {}", shown(route), netns.display());
        NetworkError::refused(what, e)
    })
}

/// Adds routes to a namespace with these interfaces.
///
/// # Errors
/// The kernel's refusals; one is through an interface that there is not.
pub(crate) fn add<'a>(
    netns: &Path,
    rtnl: &mut Rtnl,
    interfaces: &[Interface],
    routes: impl Iterator<Item = &'a Route>,
) -> Result<(), NetworkError> {
    let failed =
        |what: String| move |e| NetworkError::refused(format!("{what} in network namespace {}", netns.display()), e);
    // What a gateway is reached by must be there before the routes through the gateway.
    let (direct, via): (Vec<_>, Vec<_>) = routes.partition(|r| r.gateway.is_none());
    for route in direct.into_iter().chain(via) {
        let what = failed(format!("add the route to {} through {}", shown(route), route.interface));
        let Some(index) = interface_of(route, interfaces) else {
            return Err(what(Refusal::nonsense("the identity has no such interface")));
        };
        rtnl.change(RouteNetlinkMessage::NewRoute(route_message(index, route)), NLM_F_CREATE | NLM_F_APPEND)
            .map_err(what)?;
    }
    Ok(())
}

/// Adds the policy rules, whose tables are there.
///
/// # Errors
/// The kernel's refusals.
pub(crate) fn add_rules(netns: &Path, rtnl: &mut Rtnl, identity: &NetworkIdentity) -> Result<(), NetworkError> {
    identity.rules.iter().try_for_each(|rule| {
        rules::add(rtnl, rule).map_err(|e| {
            let what = format!("add the policy rule of priority {}", rule.priority);
            NetworkError::refused(format!("{what} in network namespace {}", netns.display()), e)
        })
    })
}

fn route_message(interface: u32, route: &Route) -> RouteMessage {
    let mut message = RouteMessage::default();
    let (destination, prefix) = route.destination.unwrap_or(match route.gateway {
        Some(IpAddr::V6(_)) => (IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0),
        _ => (IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0),
    });
    let header = &mut message.header;
    header.address_family = if destination.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    header.destination_prefix_length = prefix;
    // The header has room for small numbers only.
    header.table = u8::try_from(route.table).unwrap_or(RouteHeader::RT_TABLE_UNSPEC);
    header.protocol = RouteProtocol::Boot;
    header.kind = RouteType::Unicast;
    header.scope =
        if route.gateway.is_none() && destination.is_ipv4() { RouteScope::Link } else { RouteScope::Universe };
    if route.onlink {
        header.flags = RouteFlags::Onlink;
    }
    if prefix > 0 {
        message.attributes.push(RouteAttribute::Destination(destination.into()));
    }
    if let Some(gateway) = route.gateway {
        message.attributes.push(RouteAttribute::Gateway(gateway.into()));
    }
    if let Some(source) = route.preferred_source {
        message.attributes.push(RouteAttribute::PrefSource(source.into()));
    }
    if route.metric != 0 {
        message.attributes.push(RouteAttribute::Priority(route.metric));
    }
    message.attributes.push(RouteAttribute::Oif(interface));
    message.attributes.push(RouteAttribute::Table(route.table));
    message
}

fn shown(route: &Route) -> String {
    route.destination.map_or("anywhere".into(), |(address, prefix)| format!("{address}/{prefix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: &str = "10.1.0.1";
    const THEIRS: &str = "10.1.0.254";

    fn default(gateway: &str, metric: u32, interface: &str) -> Route {
        let gateway = Some(gateway.parse().unwrap());
        let interface = interface.to_owned();
        Route { destination: None, gateway, interface, metric, preferred_source: None, onlink: false, table: 254 }
    }

    fn changes(asked: &[Route], there: &[Route]) -> (Vec<Route>, Vec<Route>) {
        let Changes { delete, add } = Changes::of(asked, there, (&[THEIRS.parse().unwrap()], false));
        (delete, add)
    }

    fn changes_of_another(asked: &[Route], there: &[Route]) -> (Vec<Route>, Vec<Route>) {
        let Changes { delete, add } = Changes::of(asked, there, (&[THEIRS.parse().unwrap()], true));
        (delete, add)
    }

    #[test]
    fn an_engine_s_gateway_stands_for_that_of_another() {
        let there = [default(OURS, 100, "eth0")];
        for asked in [default(THEIRS, 100, "eth0"), default(THEIRS, 0, "eth0"), default(THEIRS, 0, "eth1")] {
            assert_eq!(changes_of_another(&[asked], &there), (vec![], vec![]));
        }
    }

    #[test]
    fn what_a_program_has_changed_is_changed() {
        let there = [default(OURS, 0, "eth0")];
        let of_program = default("10.1.0.7", 0, "eth0");
        assert_eq!(changes(std::slice::from_ref(&of_program), &there), (there.to_vec(), vec![of_program.clone()]));
        assert_eq!(changes(&[], &there), (there.to_vec(), vec![]));
        // By another interface, or with another metric.
        for changed in [default(THEIRS, 0, "eth1"), default(THEIRS, 50, "eth0")] {
            let gateway = if changed.interface == "eth0" { OURS } else { THEIRS };
            let expected = default(gateway, changed.metric, &changed.interface);
            assert_eq!(changes(&[changed], &there), (there.to_vec(), vec![expected]));
        }
        // Beside the engine's.
        let second = default("10.1.0.7", 50, "eth0");
        assert_eq!(changes(&[default(THEIRS, 0, "eth0"), second.clone()], &there), (vec![], vec![second]));
        let further = [default(THEIRS, 0, "eth0"), default(THEIRS, 50, "eth0")];
        assert_eq!(changes(&further, &there), (vec![], vec![default(OURS, 50, "eth0")]));
        let to = |gateway: &str| Route {
            destination: Some(("10.9.0.0".parse().unwrap(), 16)),
            ..default(gateway, 0, "eth0")
        };
        assert_eq!(changes(&[default(THEIRS, 0, "eth0"), to(THEIRS)], &there), (vec![], vec![to(OURS)]));
        assert_eq!(changes(&[to(THEIRS)], &[]), (vec![], vec![to(THEIRS)]));
    }

    #[test]
    fn where_the_engine_gives_no_gateway_there_is_none() {
        assert_eq!(changes_of_another(&[default(THEIRS, 0, "eth0")], &[]), (vec![], vec![]));
        // It is not known which are the engine's.
        let asked = [default(THEIRS, 0, "eth0")];
        let there = [default(OURS, 0, "eth0"), default(OURS, 9, "eth1")];
        assert_eq!(Changes::of(&asked, &there, (&[], false)), Changes::default());
    }
}
