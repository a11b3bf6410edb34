import{g as t,h as u}from"./chunk-DR4JT6Y7.js";function n(r=!0){let e=u(null);return t(()=>{r&&e.current?.focus()},[]),e}export{n as a};
