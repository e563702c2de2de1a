//! The part of a protection domain that its objects keep alive.

use std::rc::Rc;

use crate::error::CreateError;
use crate::provider::control::Control;

/// The domain's number, kept alive by every object in the domain.
pub(crate) struct PdObject {
    pub(crate) pdn: u32,
    pub(crate) control: Control,
}

impl PdObject {
    pub(crate) fn new(control: &Control) -> Result<Rc<Self>, CreateError> {
        Ok(Rc::new(Self {
            pdn: control.alloc_pd()?,
            control: control.clone(),
        }))
    }
}

impl Drop for PdObject {
    fn drop(&mut self) {
        self.control.dealloc_pd(self.pdn);
    }
}
