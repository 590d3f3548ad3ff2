use utoipa::OpenApi;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Tranship agent",
        description = "Moves running containers between nodes. Spoken over the agent's Unix socket, for root alone.",
    ),
    paths(
        crate::server::node,
        crate::server::peers,
        crate::server::containers,
        crate::server::companions,
        crate::server::begin_move,
        crate::server::plan,
        crate::server::recover,
        crate::server::leftovers,
        crate::server::remove_leftovers,
        crate::server::held_addresses,
        crate::server::release,
        crate::server::kept_paths,
        crate::server::reports,
        crate::server::report,
        crate::server::cancel,
        crate::server::events,
        crate::server::begin_group,
        crate::server::plan_group,
        crate::server::groups,
        crate::server::group,
        crate::server::cancel_group,
        crate::server::group_events,
        crate::server::openapi,
    )
)]
struct Description;

/// The OpenAPI description of the whole API.
pub fn description() -> utoipa::openapi::OpenApi {
    Description::openapi()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn the_description_lists_every_route_and_no_other() {
        let served: BTreeSet<String> = crate::server::routes().iter().map(|(path, _)| (*path).to_owned()).collect();
        let described: BTreeSet<String> = description().paths.paths.keys().cloned().collect();
        assert_eq!(served, described);
        let migrations = &description().paths.paths["/v1/migrations"];
        assert!(migrations.get.is_some() && migrations.post.is_some());
    }

    #[test]
    fn every_schema_that_is_referred_to_is_there() {
        let text = description().to_json().unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let schemas = json["components"]["schemas"].as_object().unwrap();
        for part in text.split("#/components/schemas/").skip(1) {
            let name = part.split('"').next().unwrap();
            assert!(schemas.contains_key(name), "{name}");
        }
        assert_eq!(schemas["BlockerKind"]["enum"][0], "no-such-container");
        assert_eq!(schemas["NodeName"]["type"], "string");
        let request = schemas["MoveRequest"]["allOf"].as_array().unwrap();
        let required: Vec<_> = request.iter().filter_map(|part| part["required"].as_array()).flatten().collect();
        assert_eq!(required, ["container", "to"]);
        // Closed parts would exclude each other's fields.
        assert!(request.iter().all(|part| part.get("additionalProperties").is_none()), "{request:?}");
        assert!(schemas["MoveOptions"].get("required").is_none());
    }
}
