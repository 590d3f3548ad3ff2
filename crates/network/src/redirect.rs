//! Traffic control: whatever arrives at one interface arrives at another instead.

use netlink_packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use netlink_packet_route::link::{AfSpecInet6, AfSpecUnspec, In6AddrGenMode, LinkAttribute};
use netlink_packet_route::tc::{
    TcAction, TcActionAttribute, TcActionMirrorOption, TcActionOption, TcActionType, TcAttribute, TcFilterU32Option,
    TcHandle, TcMessage, TcMirror, TcMirrorActionType, TcOption, TcU32Key, TcU32Selector, TcU32SelectorFlags,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};

use crate::link;
use crate::reply::Refusal;
use crate::rtnl::Rtnl;

const INGRESS: TcHandle = TcHandle { major: 0xffff, minor: 0 };
const AT_INGRESS: TcHandle = TcHandle { major: 0xffff, minor: 0xfff1 };
const ALL_PROTOCOLS: u16 = 3;

/// Sets interface `from` up so that what it receives is received by the interface of index `to` instead.
pub(crate) fn to_reception(rtnl: &mut Rtnl, from: &str, to: u32) -> Result<(), Refusal> {
    let index = link::by_name(rtnl, from)?.ok_or_else(|| Refusal::nonsense(format!("{from} is gone")))?.index;
    // No address of its own, hence nothing to say to anyone. Kernels without IPv6 refuse, and need none of it.
    let silent = AfSpecUnspec::Inet6(vec![AfSpecInet6::AddrGenMode(In6AddrGenMode::None)]);
    let silent = link::message(index, [LinkAttribute::AfSpecUnspec(vec![silent])]);
    let _ = rtnl.change(RouteNetlinkMessage::SetLink(silent), 0);

    let mut qdisc = message(index, INGRESS, AT_INGRESS, 0);
    qdisc.attributes.push(TcAttribute::Kind("ingress".into()));
    rtnl.change(RouteNetlinkMessage::NewQueueDiscipline(qdisc), NLM_F_CREATE | NLM_F_EXCL)?;

    let mut mirror = TcMirror::default();
    mirror.generic.action = TcActionType::Stolen;
    mirror.eaction = TcMirrorActionType::IngressRedir;
    mirror.ifindex = to;
    let mut action = TcAction::default();
    action.tab = 1;
    action.attributes = vec![
        TcActionAttribute::Kind("mirred".into()),
        TcActionAttribute::Options(vec![TcActionOption::Mirror(TcActionMirrorOption::Parms(mirror))]),
    ];
    // One key that every frame matches.
    let mut selector = TcU32Selector::default();
    selector.flags = TcU32SelectorFlags::Terminal;
    selector.nkeys = 1;
    selector.keys = vec![TcU32Key::default()];
    let priority = 1;
    let mut filter = message(index, TcHandle::default(), INGRESS, priority << 16 | u32::from(ALL_PROTOCOLS.to_be()));
    filter.attributes.push(TcAttribute::Kind("u32".into()));
    filter.attributes.push(TcAttribute::Options(vec![
        TcOption::U32(TcFilterU32Option::Selector(selector)),
        TcOption::U32(TcFilterU32Option::Action(vec![action])),
    ]));
    rtnl.change(RouteNetlinkMessage::NewTrafficFilter(filter), NLM_F_CREATE | NLM_F_EXCL)?;
    link::set_up(rtnl, index)
}

fn message(index: u32, handle: TcHandle, parent: TcHandle, info: u32) -> TcMessage {
    let mut message = TcMessage::default();
    message.header.family = AddressFamily::Unspec;
    message.header.index = index.cast_signed();
    message.header.handle = handle;
    message.header.parent = parent;
    message.header.info = info;
    message
}
