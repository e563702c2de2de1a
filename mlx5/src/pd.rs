//! The part of a protection domain that its objects keep alive.

use std::rc::Rc;

use crate::control::Control;
use crate::error::CreateError;

pub(crate) struct PdObject {
    pub(crate) pdn: u32,
    pub(crate) control: Control,
}

impl PdObject {
    pub(crate) fn new(control: &Control) -> Result<Rc<Self>, CreateError> {
        Ok(Rc::new(Self {
            pdn: control.queues().alloc_pd()?,
            control: control.clone(),
        }))
    }
}

impl Drop for PdObject {
    fn drop(&mut self) {
        self.control.queues().dealloc_pd(self.pdn);
    }
}
