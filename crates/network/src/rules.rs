//! Policy rules: which of a namespace's routing tables is asked for what.

use std::net::IpAddr;

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL, Nla};
use netlink_packet_route::route::RouteHeader;
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage, RulePortRange, RuleUidRange};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use tranship_types::{Rule, RuleVerdict};

use crate::reply::Refusal;
use crate::rtnl::Rtnl;

const TABLE_DEFAULT: u32 = 253;
const TABLE_MAIN: u32 = RouteHeader::RT_TABLE_MAIN as u32;
const TABLE_LOCAL: u32 = 255;
/// Priorities and tables of the rules that a new namespace has; IPv6 has no table `default`.
const FRESH: [(u32, u32); 3] = [(0, TABLE_LOCAL), (32766, TABLE_MAIN), (32767, TABLE_DEFAULT)];
/// Nothing is suppressed.
const NONE: u32 = u32::MAX;
// linux/fib_rules.h: which bits of a port are compared, since Linux 6.15.
const SOURCE_PORT_MASK: u16 = 28;
const DESTINATION_PORT_MASK: u16 = 29;

/// What a namespace's rules are besides those that a new one has, or what there is about them that cannot be made again.
pub(crate) fn added(rtnl: &mut Rtnl) -> Result<Result<Vec<Rule>, String>, Refusal> {
    let mut rules = Vec::new();
    let answers = match rtnl.list(&RouteNetlinkMessage::GetRule(RuleMessage::default())) {
        // The decoder takes this number for a shorter one than it is, and gives up.
        Err(refusal) if refusal.to_string().contains("FRA_TUN_ID") => {
            return Ok(Err("a policy rule that has the id of a tunnel for its condition".into()));
        }
        answers => answers?,
    };
    for answer in answers {
        let RouteNetlinkMessage::NewRule(message) = answer else { continue };
        // Those of multicast routing are of families of their own, where a new namespace has one.
        if matches!(message.header.family, AddressFamily::Inet | AddressFamily::Inet6) {
            match read(&message) {
                Ok(rule) => rules.push(rule),
                Err(what) => return Ok(Err(what)),
            }
        }
    }
    for ipv6 in [false, true] {
        for (priority, table) in FRESH.into_iter().filter(|(_, table)| !ipv6 || *table != TABLE_DEFAULT) {
            // A kernel without a family has no rules of it.
            let there = rules.iter().any(|rule| rule.ipv6 == ipv6);
            let fresh = Rule { ipv6, ..Rule::to_table(priority, table) };
            match rules.iter().position(|rule| *rule == fresh) {
                Some(at) => drop(rules.remove(at)),
                None if there => {
                    return Ok(Err(format!("no policy rule of priority {priority} any more, which every new one has")));
                }
                None => {}
            }
        }
    }
    Ok(Ok(rules))
}

pub(crate) fn read(message: &RuleMessage) -> Result<Rule, String> {
    let header = &message.header;
    let mut rule = Rule { ipv6: header.family == AddressFamily::Inet6, ..Rule::to_table(0, u32::from(header.table)) };
    let mut unknown = None;
    let (mut mark, mut mask) = (0, 0);
    for attribute in &message.attributes {
        match attribute {
            RuleAttribute::Priority(priority) => rule.priority = *priority,
            RuleAttribute::Table(table) => rule.verdict = RuleVerdict::Table(*table),
            RuleAttribute::Source(address) => rule.source = Some((*address, header.src_len)),
            RuleAttribute::Destination(address) => rule.destination = Some((*address, header.dst_len)),
            RuleAttribute::FwMark(value) => mark = *value,
            RuleAttribute::FwMask(value) => mask = *value,
            RuleAttribute::Iifname(name) => rule.incoming = Some(name.clone()),
            RuleAttribute::Oifname(name) => rule.outgoing = Some(name.clone()),
            RuleAttribute::IpProtocol(protocol) => rule.protocol = Some(u8::from(*protocol)),
            RuleAttribute::SourcePortRange(ports) => rule.source_ports = Some((ports.start, ports.end)),
            RuleAttribute::DestinationPortRange(ports) => rule.destination_ports = Some((ports.start, ports.end)),
            RuleAttribute::UidRange(users) => rule.users = Some((users.start, users.end)),
            RuleAttribute::SuppressPrefixLen(length) => rule.suppressed = Some(*length).filter(|l| *l != NONE),
            // Who has made it, which nothing depends on; and what says nothing.
            RuleAttribute::Protocol(_) | RuleAttribute::L3MDev(false) | RuleAttribute::SuppressIfGroup(NONE) => {}
            RuleAttribute::Other(other) if says_nothing(other) => {}
            other => unknown = Some(other.kind()),
        }
    }
    rule.mark = Some((mark, mask)).filter(|both| *both != (0, 0));
    rule.inverted = header.flags.contains(RuleFlags::Invert);
    rule.type_of_service = header.tos;
    rule.verdict = match (header.action, rule.verdict) {
        (RuleAction::ToTable, table) => table,
        (RuleAction::Blackhole, _) => RuleVerdict::Blackhole,
        (RuleAction::Unreachable, _) => RuleVerdict::Unreachable,
        (RuleAction::Prohibit, _) => RuleVerdict::Prohibit,
        (action, _) => return Err(format!("a policy rule of priority {} with action {action:?}", rule.priority)),
    };
    match unknown {
        None => Ok(rule),
        Some(kind) => Err(format!(
            "a policy rule of priority {} with a condition (of kind {kind} in linux/fib_rules.h) that is not carried",
            rule.priority
        )),
    }
}

/// Whether all bits of a port are compared, as without a mask.
fn says_nothing(attribute: &impl Nla) -> bool {
    let mut value = [0; 2];
    let of_ports = [SOURCE_PORT_MASK, DESTINATION_PORT_MASK].contains(&attribute.kind()) && attribute.value_len() == 2;
    if of_ports {
        attribute.emit_value(&mut value);
    }
    of_ports && value == [0xff; 2]
}

/// Adds a rule behind those of the same priority.
pub(crate) fn add(rtnl: &mut Rtnl, rule: &Rule) -> Result<(), Refusal> {
    rtnl.change(RouteNetlinkMessage::NewRule(message(rule)), NLM_F_CREATE | NLM_F_EXCL)
}

fn message(rule: &Rule) -> RuleMessage {
    let mut message = RuleMessage::default();
    let header = &mut message.header;
    header.family = if rule.ipv6 { AddressFamily::Inet6 } else { AddressFamily::Inet };
    header.tos = rule.type_of_service;
    let length = |prefix: Option<(IpAddr, u8)>| prefix.map_or(0, |(_, length)| length);
    (header.src_len, header.dst_len) = (length(rule.source), length(rule.destination));
    header.flags = if rule.inverted { RuleFlags::Invert } else { RuleFlags::empty() };
    header.action = match rule.verdict {
        RuleVerdict::Table(_) => RuleAction::ToTable,
        RuleVerdict::Blackhole => RuleAction::Blackhole,
        RuleVerdict::Unreachable => RuleAction::Unreachable,
        RuleVerdict::Prohibit => RuleAction::Prohibit,
    };
    let ports = |(start, end)| RulePortRange { start, end };
    let table = match rule.verdict {
        RuleVerdict::Table(table) => Some(RuleAttribute::Table(table)),
        _ => None,
    };
    let conditions = [
        Some(RuleAttribute::Priority(rule.priority)),
        table,
        rule.source.map(|(address, _)| RuleAttribute::Source(address)),
        rule.destination.map(|(address, _)| RuleAttribute::Destination(address)),
        rule.mark.map(|(mark, _)| RuleAttribute::FwMark(mark)),
        rule.mark.map(|(_, mask)| RuleAttribute::FwMask(mask)),
        rule.incoming.clone().map(RuleAttribute::Iifname),
        rule.outgoing.clone().map(RuleAttribute::Oifname),
        rule.protocol.map(|protocol| RuleAttribute::IpProtocol(protocol.into())),
        rule.source_ports.map(|range| RuleAttribute::SourcePortRange(ports(range))),
        rule.destination_ports.map(|range| RuleAttribute::DestinationPortRange(ports(range))),
        rule.users.map(|(start, end)| RuleAttribute::UidRange(RuleUidRange { start, end })),
        rule.suppressed.map(RuleAttribute::SuppressPrefixLen),
    ];
    message.attributes = conditions.into_iter().flatten().collect();
    message
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn verdict() -> impl Strategy<Value = RuleVerdict> {
        prop_oneof![
            any::<u32>().prop_map(RuleVerdict::Table),
            Just(RuleVerdict::Blackhole),
            Just(RuleVerdict::Unreachable),
            Just(RuleVerdict::Prohibit)
        ]
    }

    proptest! {
        #[test]
        fn a_rule_is_read_as_it_was_written(
            verdict in verdict(), priority: u32, mark: Option<(u32, u32)>, protocol: Option<u8>, ports: Option<(u16, u16)>,
            users: Option<(u32, u32)>, inverted: bool, type_of_service: u8, source: Option<(IpAddr, u8)>,
            incoming in proptest::option::of("[a-z0-9]{1,15}"), suppressed in proptest::option::of(0..128u32),
        ) {
            let rule = Rule {
                verdict, protocol, users, inverted, type_of_service, source, incoming, suppressed,
                mark: mark.filter(|both| *both != (0, 0)),
                destination_ports: ports,
                ipv6: source.is_some_and(|(address, _)| address.is_ipv6()),
                ..Rule::to_table(priority, 7)
            };
            prop_assert_eq!(read(&message(&rule)).unwrap(), rule);
        }
    }
}
