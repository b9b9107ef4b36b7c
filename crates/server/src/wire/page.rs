//! Pages of lists on the wire: one shape for all of them, `{items, next}`, and `Link: rel="next"`. The cursor itself is
//! the library's, and it alone knows what it stands for.

use axum::http::header::LINK;
use axum::http::{HeaderValue, Uri};
use axum::response::{IntoResponse, Response};
use latchwork::{Cursor, Page};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::request::json_answer;
use crate::wire::store::cursor;

/// The size of a page, by default and at most.
const PAGE: usize = 100;
const MOST: usize = 1000;

/// Which page of a list is asked for. A list with more parameters repeats these two and makes one of them.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PageQuery {
    /// Continues after an earlier page: its `next`.
    pub(crate) after: Option<String>,
    /// The number of items of a page: 1 to 1000, by default 100.
    #[param(minimum = 1, maximum = 1000)]
    pub(crate) limit: Option<usize>,
}

impl PageQuery {
    /// The cursor after which the page begins.
    pub(crate) fn cursor(&self) -> Result<Option<Cursor>, Problem> {
        cursor(self.after.as_deref())
    }

    /// The size of the page.
    pub(crate) fn limit(&self) -> Result<usize, Problem> {
        match self.limit.unwrap_or(PAGE) {
            limit @ 1..=MOST => Ok(limit),
            limit => {
                let detail = format!("a page has 1 to {MOST} items, not {limit}");
                Err(Problem::new(ProblemCode::InvalidQuery, detail))
            }
        }
    }
}

/// A page of a list.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PageWire<T> {
    /// The items, in the order of the list.
    pub(crate) items: Vec<T>,
    /// Where the next page begins: the parameter `after` of the next request. Null on the last page.
    #[schema(required)]
    pub(crate) next: Option<String>,
}

/// Answers with a page. `uri` is that of the request: the link to the next page repeats its other parameters.
pub(crate) fn page_answer<T, U: Serialize>(uri: &Uri, page: Page<T>, shape: impl FnMut(T) -> U) -> Response {
    let Page { items, next } = page.map(shape);
    listed(uri, PageWire { items, next: next.map(|next| next.to_string()) })
}

/// Answers with a page that is in its shape already.
pub(crate) fn listed<T: Serialize>(uri: &Uri, page: PageWire<T>) -> Response {
    let link = page.next.as_ref().and_then(|next| next_link(uri, next));
    let mut answer = json_answer(&page).into_response();
    if let Some(link) = link {
        answer.headers_mut().insert(LINK, link);
    }
    answer
}

/// A link relative to the request, so that it holds wherever the router is mounted.
fn next_link(uri: &Uri, next: &str) -> Option<HeaderValue> {
    let query = uri.query().unwrap_or_default();
    let others = query.split('&').filter(|part| !part.is_empty() && !part.starts_with("after="));
    let others: String = others.map(|part| format!("{part}&")).collect();
    HeaderValue::try_from(format!("<?{others}after={next}>; rel=\"next\"")).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_link_to_the_next_page_repeats_the_other_parameters() {
        let link = |uri: &str| next_link(&uri.parse().unwrap(), "0a");
        assert_eq!(link("/entities").unwrap(), "<?after=0a>; rel=\"next\"");
        assert_eq!(link("/entities?limit=2&after=07&x=%20").unwrap(), "<?limit=2&x=%20&after=0a>; rel=\"next\"");
    }

    #[test]
    fn a_page_has_one_to_a_thousand_items() {
        let limit = |limit| PageQuery { after: None, limit }.limit();
        assert_eq!(limit(None).ok(), Some(100));
        assert_eq!(limit(Some(1000)).ok(), Some(1000));
        for wrong in [0, 1001] {
            assert_eq!(limit(Some(wrong)).unwrap_err().code(), ProblemCode::InvalidQuery);
        }
    }
}
