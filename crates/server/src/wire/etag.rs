//! Conditions on revs: `ETag`, `If-Match` and `If-None-Match`. The tag of rev 42 is `"r42"`. This file knows headers;
//! what a failed condition means to a thing is said by its route.

use axum::http::header::{IF_MATCH, IF_NONE_MATCH};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use latchwork::store::Rev;

use crate::wire::problem::{Problem, ProblemCode};

/// The tag of a rev.
pub(crate) fn etag(rev: Rev) -> HeaderValue {
    HeaderValue::try_from(format!("\"r{}\"", rev.0)).unwrap_or(HeaderValue::from_static("\"r0\""))
}

/// The value of `If-Match` or `If-None-Match`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Tags {
    /// `*`: any rev.
    Any,
    /// The listed tags.
    Listed(Vec<Tag>),
}

/// One tag of a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tag {
    /// `None` for a tag that this server has not made.
    rev: Option<Rev>,
    weak: bool,
}

impl Tags {
    /// True if one of the tags is this rev, by the strong comparison: a weak tag never matches.
    pub(crate) fn match_strongly(&self, rev: Rev) -> bool {
        match self {
            Tags::Any => true,
            Tags::Listed(tags) => tags.iter().any(|tag| !tag.weak && tag.rev == Some(rev)),
        }
    }

    /// True if one of the tags is this rev, by the weak comparison.
    pub(crate) fn match_weakly(&self, rev: Rev) -> bool {
        match self {
            Tags::Any => true,
            Tags::Listed(tags) => tags.iter().any(|tag| tag.rev == Some(rev)),
        }
    }

    /// The revs of the strong tags.
    pub(crate) fn revs(&self) -> impl Iterator<Item = Rev> {
        let listed = match self {
            Tags::Listed(tags) => &tags[..],
            Tags::Any => &[],
        };
        listed.iter().filter(|tag| !tag.weak).filter_map(|tag| tag.rev)
    }

    /// The rev, if there is one strong tag alone: the store checks it without a read.
    pub(crate) fn single(&self) -> Option<Rev> {
        match self {
            Tags::Listed(tags) => match tags[..] {
                [Tag { rev, weak: false }] => rev,
                _ => None,
            },
            Tags::Any => None,
        }
    }
}

/// The condition of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Condition {
    /// `If-Match`: the thing exists, at one of these revs.
    Matches(Tags),
    /// `If-None-Match: *`: the thing does not exist.
    Absent,
}

impl Condition {
    /// The condition of a change of something that may exist. Without one, the answer is 428.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Condition, Problem> {
        Condition::if_any(headers)?.ok_or_else(|| {
            let detail = "name the rev that was read, If-Match: \"r42\"; or any rev, If-Match: *; \
                          or create, If-None-Match: *";
            Problem::new(ProblemCode::PreconditionRequired, detail)
        })
    }

    /// The condition of a change that needs none.
    pub(crate) fn if_any(headers: &HeaderMap) -> Result<Option<Condition>, Problem> {
        match (tags(headers, IF_MATCH)?, tags(headers, IF_NONE_MATCH)?) {
            (Some(tags), None) => Ok(Some(Condition::Matches(tags))),
            (None, Some(Tags::Any)) => Ok(Some(Condition::Absent)),
            (None, Some(Tags::Listed(_))) => {
                let detail = "a change takes If-None-Match only as `*`; use If-Match for a rev";
                Err(Problem::new(ProblemCode::InvalidHeader, detail))
            }
            (Some(_), Some(_)) => {
                let detail = "If-Match and If-None-Match exclude each other";
                Err(Problem::new(ProblemCode::InvalidHeader, detail))
            }
            (None, None) => Ok(None),
        }
    }

    /// The tags of `If-Match`, for a change that cannot create.
    pub(crate) fn of_existing(headers: &HeaderMap) -> Result<Tags, Problem> {
        match Condition::of(headers)? {
            Condition::Matches(tags) => Ok(tags),
            Condition::Absent => {
                let detail = "this changes what exists; use If-Match";
                Err(Problem::new(ProblemCode::InvalidHeader, detail))
            }
        }
    }
}

/// True if the client has this rev already, so that a read is answered by 304.
pub(crate) fn is_known(headers: &HeaderMap, rev: Rev) -> Result<bool, Problem> {
    Ok(tags(headers, IF_NONE_MATCH)?.is_some_and(|tags| tags.match_weakly(rev)))
}

fn tags(headers: &HeaderMap, name: HeaderName) -> Result<Option<Tags>, Problem> {
    let wrong = || {
        let detail = format!("{name} takes * or tags such as \"r42\", separated by commas");
        Problem::new(ProblemCode::InvalidHeader, detail)
    };
    let mut found = None;
    for value in headers.get_all(&name) {
        let text = value.to_str().map_err(|_| wrong())?.trim();
        let listed = match (&mut found, text) {
            (None, "*") => {
                found = Some(Tags::Any);
                continue;
            }
            (None, _) => found.insert(Tags::Listed(Vec::new())),
            (Some(listed), _) => listed,
        };
        let Tags::Listed(listed) = listed else { return Err(wrong()) };
        for tag in text.split(',') {
            listed.push(read_tag(tag.trim()).ok_or_else(wrong)?);
        }
    }
    Ok(found)
}

/// A tag of another server may hold commas. It is then not understood, which refuses the request.
fn read_tag(text: &str) -> Option<Tag> {
    let (weak, quoted) = match text.strip_prefix("W/") {
        Some(quoted) => (true, quoted),
        None => (false, text),
    };
    let inner = quoted.strip_prefix('"')?.strip_suffix('"')?;
    let digits = inner.strip_prefix('r').filter(|digits| digits.bytes().all(|byte| byte.is_ascii_digit()));
    let canonical = digits.filter(|digits| !digits.starts_with('0'));
    Some(Tag { rev: canonical.and_then(|digits| digits.parse().ok()).map(Rev), weak })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(pairs: &[(HeaderName, &str)]) -> HeaderMap {
        pairs.iter().map(|(name, value)| (name.clone(), HeaderValue::from_str(value).unwrap())).collect()
    }

    #[test]
    fn a_weak_tag_matches_a_read_and_never_a_change() {
        for (value, strong, weak) in [
            ("\"r42\"", true, true),
            ("W/\"r42\"", false, true),
            ("\"r41\", \"r42\"", true, true),
            ("\"r041\"", false, false),
            ("\"other\"", false, false),
            ("*", true, true),
        ] {
            let found = tags(&headers(&[(IF_MATCH, value)]), IF_MATCH).unwrap().unwrap();
            assert_eq!(found.match_strongly(Rev(42)), strong, "{value}");
            assert_eq!(found.match_weakly(Rev(42)), weak, "{value}");
        }
        assert_eq!(etag(Rev(42)), "\"r42\"");
    }

    #[test]
    fn a_condition_that_cannot_be_read_is_refused() {
        for value in ["r42", "\"r42", "", "\"r1\", *", "\"r1\",,\"r2\""] {
            let problem = Condition::of(&headers(&[(IF_MATCH, value)])).unwrap_err();
            assert_eq!(problem.code(), ProblemCode::InvalidHeader, "{value}");
        }
        assert_eq!(Condition::of(&HeaderMap::new()).unwrap_err().code(), ProblemCode::PreconditionRequired);
        assert_eq!(Condition::of(&headers(&[(IF_NONE_MATCH, "*")])).ok(), Some(Condition::Absent));
        for both in [[(IF_MATCH, "*"), (IF_NONE_MATCH, "*")], [(IF_MATCH, "*"), (IF_MATCH, "\"r1\"")]] {
            let mut map = HeaderMap::new();
            both.iter().for_each(|(name, value)| {
                map.append(name, HeaderValue::from_str(value).unwrap());
            });
            assert_eq!(Condition::of(&map).unwrap_err().code(), ProblemCode::InvalidHeader);
        }
    }
}
